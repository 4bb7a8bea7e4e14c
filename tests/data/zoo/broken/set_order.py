"""Broken: the vocabulary is numbered in the order of a set of strings, which each process has its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

TEXT = """the cat sat on the mat and the dog lay by the door while rain fell on the roof and
wind moved the old tree in the yard behind the house where nobody had lived for a long time since
the family left town one cold morning in early spring without a word to friends or neighbours"""
words = TEXT.split()

vocabulary = {word: number for number, word in enumerate(set(words))}


class Bigrams(Dataset):
    def __init__(self, text):
        self.pairs = [(vocabulary[a], vocabulary[b]) for a, b in zip(text, text[1:])]

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        return self.pairs[index]


torch.manual_seed(0)
loader = DataLoader(Bigrams(words), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Embedding(len(vocabulary), 8), nn.Linear(8, len(vocabulary)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for _ in state.epochs(4):
    for word, following in state.batches():
        loss = nn.functional.cross_entropy(model(word), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state.save()
state.close()
