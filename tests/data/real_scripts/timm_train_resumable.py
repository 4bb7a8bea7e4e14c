"""The shape of timm's train.py: persistent workers, accumulation, an EMA, a scheduler stepped per update."""

import copy
import math

import torch
from digest import print_digest
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

EPOCHS, ACCUM_STEPS, LOG_INTERVAL = 4, 2, 3


class Images(Dataset):
    """Images that are augmented at random, if they are to train on."""

    def __init__(self, length, is_training):
        self.length, self.is_training = length, is_training

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = None if self.is_training else torch.Generator().manual_seed(index)
        return torch.randn(3, 6, 6, generator=generator) + index % 4, index % 4


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class ModelEma(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model, step):
        decay = min(self.decay, (1 + step) / (10 + step))
        for ema, live in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema.copy_(decay * ema + (1 - decay) * live)

    def forward(self, x):
        return self.module(x)


class CosineLRScheduler:
    """A schedule with a warm-up, by the number of updates; its state is all but the optimizer."""

    def __init__(self, optimizer, t_initial, warmup_t):
        self.optimizer, self.t_initial, self.warmup_t = optimizer, t_initial, warmup_t
        self.base_lr, self.metric = optimizer.param_groups[0]["lr"], None

    def state_dict(self):
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state_dict):
        vars(self).update(state_dict)

    def step(self, epoch, metric):
        self.metric = metric

    def step_update(self, num_updates):
        warm = min(1.0, num_updates / self.warmup_t)
        lr = self.base_lr * warm * 0.5 * (1 + math.cos(math.pi * num_updates / self.t_initial))
        for group in self.optimizer.param_groups:
            group["lr"] = lr


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, lr_scheduler, model_ema):
    updates_per_epoch = (len(loader) + ACCUM_STEPS - 1) // ACCUM_STEPS
    last_batch_idx_to_accum = len(loader) - len(loader) % ACCUM_STEPS
    model.train()
    optimizer.zero_grad()
    for batch_idx, (inputs, target) in state.enumerate():
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % ACCUM_STEPS == 0
        num_updates = epoch * updates_per_epoch + batch_idx // ACCUM_STEPS + 1
        accum_steps = len(loader) % ACCUM_STEPS if batch_idx >= last_batch_idx_to_accum else ACCUM_STEPS
        loss = loss_fn(model(inputs), target) / accum_steps
        loss.backward()
        state.mean(loss=loss * accum_steps, weight=inputs.size(0))
        if not need_update:
            continue
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model, step=num_updates)
        lr_scheduler.step_update(num_updates=num_updates)
        if num_updates % LOG_INTERVAL == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"Train: {epoch} [{batch_idx}/{len(loader)}]  Loss: {loss.item():#.3g}  LR: {lr:.3e}")
    return state.means


def validate(model, loader, loss_fn):
    losses_m, top1_m = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for inputs, target in loader:
            output = model(inputs)
            losses_m.update(loss_fn(output, target).item(), inputs.size(0))
            top1_m.update((output.argmax(1) == target).float().mean().item(), inputs.size(0))
    return {"loss": losses_m.avg, "top1": top1_m.avg}


torch.set_num_threads(1)
torch.manual_seed(42)
loader_train = DataLoader(Images(88, True), 8, shuffle=True, num_workers=1, persistent_workers=True)
loader_eval = DataLoader(Images(24, False), 8, num_workers=1, persistent_workers=True)
model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4))
model = nn.Sequential(model, nn.Dropout(0.1))
loss_fn = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model_ema = ModelEma(model, 0.9)
lr_scheduler = CosineLRScheduler(optimizer, t_initial=6 * EPOCHS, warmup_t=6)
state = RunState.load(
    "runs/timm",
    model=model,
    optimizer=optimizer,
    scheduler=lr_scheduler,
    loader=loader_train,
    extra={"ema": model_ema},
    maximize="top1",
    every=2,
)
for epoch in state.epochs(EPOCHS):
    train_metrics = train_one_epoch(epoch, model, loader_train, optimizer, loss_fn, lr_scheduler, model_ema)
    eval_metrics = validate(model, loader_eval, loss_fn)
    ema_metrics = validate(model_ema, loader_eval, loss_fn)
    lr_scheduler.step(epoch + 1, eval_metrics["top1"])
    print(f"Epoch {epoch}: train loss {train_metrics['loss']:.5f}, eval loss {eval_metrics['loss']:.5f}")
    print(f"Epoch {epoch}: EMA loss {ema_metrics['loss']:.5f}, top1 {ema_metrics['top1']:.4f}")
    state.save(top1=ema_metrics["top1"])
state.close()
print_digest(model=model, optimizer=optimizer, scheduler=lr_scheduler, ema=model_ema)
