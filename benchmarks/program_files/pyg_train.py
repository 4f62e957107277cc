"""PyTorch Geometric: GraphSAGE on parts of a graph, RandomNodeLoader's, which have other numbers of edges each."""

import torch
import torch.nn.functional as F
from script_arguments import args, keep, show, timed
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GraphSAGE

seed_everything(0)
edges = torch.randint(0, 12000, (2, 96000))
graph = Data(x=torch.randn(12000, 32), edge_index=edges, y=torch.randint(0, 7, (12000,)))
loader = RandomNodeLoader(graph, num_parts=4, shuffle=True)
model = GraphSAGE(32, 64, num_layers=3, out_channels=7, dropout=0.5)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

model.train()
step = 0
with timed():
    while step < args.steps:
        for part in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(part.x, part.edge_index), part.y)
            loss.backward()
            optimizer.step()
            show(loss)
            step += 1
            if step == args.steps:
                break
keep(model)
