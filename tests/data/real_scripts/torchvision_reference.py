"""The shape of torchvision's references/classification: MetricLogger, mixup, an EMA, a warm-up."""

from collections import defaultdict

import torch
from digest import print_digest
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, default_collate

EPOCHS, WARMUP_EPOCHS, EMA_STEPS, CLASSES = 4, 1, 3, 4


class Images(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.randn(3, 6, 6) + index % CLASSES, index % CLASSES


class SmoothedValue:
    def __init__(self):
        self.total, self.count, self.value = 0.0, 0, 0.0

    def update(self, value, n=1):
        self.total, self.count, self.value = self.total + value * n, self.count + n, value

    @property
    def global_avg(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **values):
        for name, value in values.items():
            self.meters[name].update(value)

    def __str__(self):
        return "  ".join(f"{name}: {meter.value:.6f}" for name, meter in self.meters.items())

    def log_every(self, iterable, print_freq, header):
        for i, obj in enumerate(iterable):
            yield obj
            if i % print_freq == 0 or i == len(iterable) - 1:
                print(f"{header}  [{i}/{len(iterable)}]  {self}")


class ExponentialMovingAverage(AveragedModel):
    def __init__(self, model, decay):
        average = lambda ema, live, _: decay * ema + (1 - decay) * live  # noqa: E731
        super().__init__(model, avg_fn=average, use_buffers=True)


def mixup(batch):
    images, labels = default_collate(batch)
    target = nn.functional.one_hot(labels, CLASSES).float()
    lam = torch.rand(()).item()
    return lam * images + (1 - lam) * images.roll(1, 0), lam * target + (1 - lam) * target.roll(1, 0)


def train_one_epoch(model, criterion, optimizer, data_loader, epoch, model_ema):
    model.train()
    metric_logger = MetricLogger()
    header = f"Epoch: [{epoch}]"
    for i, (image, target) in enumerate(metric_logger.log_every(data_loader, 4, header)):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % EMA_STEPS == 0:
            model_ema.update_parameters(model)
            if epoch < WARMUP_EPOCHS:
                # Reset ema buffer to keep copying weights during warmup period
                model_ema.n_averaged.fill_(0)
        metric_logger.update(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])


def evaluate(model, criterion, data_loader, header):
    model.eval()
    metric_logger = MetricLogger()
    with torch.inference_mode():
        for image, target in metric_logger.log_every(data_loader, 2, header):
            output = model(image)
            acc1 = (output.argmax(1) == target).float().mean().item()
            metric_logger.update(loss=criterion(output, target).item())
            metric_logger.meters["acc1"].update(acc1, n=len(image))
    print(f"{header} Acc@1 {metric_logger.meters['acc1'].global_avg:.6f}")
    return metric_logger.meters["acc1"].global_avg


torch.set_num_threads(1)
torch.manual_seed(0)
data_loader = DataLoader(Images(80), batch_size=8, shuffle=True, collate_fn=mixup)
data_loader_test = DataLoader(Images(24), batch_size=8)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, CLASSES))
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
warmup = LinearLR(optimizer, start_factor=0.1, total_iters=WARMUP_EPOCHS)
main_lr_scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS - WARMUP_EPOCHS)
lr_scheduler = SequentialLR(optimizer, [warmup, main_lr_scheduler], milestones=[WARMUP_EPOCHS])
model_ema = ExponentialMovingAverage(model, 0.9)
for epoch in range(EPOCHS):
    train_one_epoch(model, criterion, optimizer, data_loader, epoch, model_ema)
    lr_scheduler.step()
    evaluate(model, criterion, data_loader_test, f"Test: [{epoch}]")
    acc1 = evaluate(model_ema, criterion, data_loader_test, f"Test EMA: [{epoch}]")
    checkpoint = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": lr_scheduler.state_dict(),
        "epoch": epoch,
        "model_ema": model_ema.state_dict(),
    }
    torch.save(checkpoint, "checkpoint.pth")
print_digest(model=model, optimizer=optimizer, scheduler=lr_scheduler, ema=model_ema)
