"""The shape of PyTorch's VAE example: a running sum of the loss, and a sample after each epoch."""

import torch
import torch.nn.functional as F
from digest import print_digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, LOG_INTERVAL = 3, 4


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(16, 12)
        self.fc21, self.fc22 = nn.Linear(12, 3), nn.Linear(12, 3)
        self.fc3, self.fc4 = nn.Linear(3, 12), nn.Linear(12, 16)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data,) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % LOG_INTERVAL == 0:
            print(
                f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item() / len(data):.6f}"
            )
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (data,) in test_loader:
            recon, mu, logvar = model(data)
            test_loss += loss_function(recon, data, mu, logvar).item()
    print(f"====> Test {epoch} set loss: {test_loss / len(test_loader.dataset):.4f}")


torch.set_num_threads(1)
torch.manual_seed(1)
images = torch.rand(116, 16)
train_loader = DataLoader(TensorDataset(images[:84]), batch_size=8, shuffle=True)
test_loader = DataLoader(TensorDataset(images[84:]), batch_size=16)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(EPOCHS):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        sample = model.decode(torch.randn(4, 3))
    print(f"sample of epoch {epoch}: {sample.sum().item():.6f}")
print_digest(model=model, optimizer=optimizer, sample=sample)
