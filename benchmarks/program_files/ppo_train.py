"""Stable-Baselines3's PPO on images of a small environment of its own."""

import gymnasium
import numpy as np
import torch
from script_arguments import args, keep, show, timed
from stable_baselines3 import PPO


class Chase(gymnasium.Env):
    """A bright point on a field; moving towards it is rewarded."""

    observation_space = gymnasium.spaces.Box(0, 255, (3, 36, 36), np.uint8)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.places, self.steps = self.np_random.integers(0, 36, (2, 2)), 0
        return self._seen(), {}

    def _seen(self):
        field = np.zeros((3, 36, 36), np.uint8)
        for channel, (row, column) in enumerate(self.places):
            field[channel, row, column] = 255
        return field

    def step(self, action):
        before = np.abs(self.places[0] - self.places[1]).sum()
        self.places[0] = np.clip(self.places[0] + [(1, 0), (-1, 0), (0, 1), (0, -1)][int(action)], 0, 35)
        self.steps += 1
        gained = float(before - np.abs(self.places[0] - self.places[1]).sum())
        return self._seen(), gained, False, self.steps == 50, {}


model = PPO("CnnPolicy", Chase(), n_steps=512, batch_size=256, n_epochs=4, learning_rate=1e-3, seed=0, device="cpu")
clip = torch.nn.utils.clip_grad_norm_


def shown(parameters, max_norm):  # PPO clips in each step and shows no loss: norms tell as much
    norm = clip(parameters, max_norm)
    show(norm)
    return norm


torch.nn.utils.clip_grad_norm_ = shown
with timed():
    model.learn(total_timesteps=512 * (args.steps // 8))
keep(model.policy)
