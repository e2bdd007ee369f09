"""Training on what the model itself generates: roll-outs, their rewards, and the trees they become.

episode     one path from a prompt to its end, as it was sampled (rollout/episode.py)
group       the episodes of one prompt, with what rewards said of each (rollouts.py)
path        an episode that has a reward (credit.py)
credit      what becomes of paths: samples with an advantage for each token, pairs, the best of a group
phase       a roll-out and the steps that train on it; an order's step is a phase's prompts (method.py)
crew        engine, rewards and environment, opened (crew.py); a roller rolls out with them
"""
