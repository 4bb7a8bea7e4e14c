"""The shape of PyTorch's time sequence prediction: LBFGS with a closure, all data in one batch."""

import torch
from digest import print_digest
from torch import nn

from resumable import RunState

STEPS = 8


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, sequence, future=0):
        outputs = []
        h_t = c_t = torch.zeros(len(sequence), 6, dtype=torch.double)
        for input_t in sequence.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            output = self.linear(h_t)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            output = self.linear(h_t)
            outputs += [output]
        return torch.cat(outputs, dim=1)


torch.set_num_threads(1)
torch.manual_seed(0)
data = torch.sin(torch.arange(12, dtype=torch.double) / 2 + torch.rand(8, 1, dtype=torch.double) * 6)
inputs, target = data[3:, :-1], data[3:, 1:]
test_inputs, test_target = data[:3, :-1], data[:3, 1:]
seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)
state = RunState.load("runs/time_sequence", model=seq, optimizer=optimizer, every=2)
for i in state.steps(STEPS):

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(inputs), target)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print(f"STEP: {i} loss: {loss.item():.10f}")
    with torch.no_grad():
        pred = seq(test_inputs, future=5)
        print(f"STEP: {i} test loss: {criterion(pred[:, :-5], test_target).item():.10f}")
state.close()
print_digest(model=seq, optimizer=optimizer)
