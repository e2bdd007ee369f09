"""Training on what the model itself generates: roll-outs, their rewards, and the trees they become."""
