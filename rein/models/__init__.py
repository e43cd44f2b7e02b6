"""Models as Rein uses them: packed rows in, [B, T] tensors out. Knows no files of rows and no rewards.

actor, critic, reward_model and reference are the roles; load, lora, identity and tiny make their models, save
writes them. Ranks are known only to ulysses, as a group that is passed in. A
pass: trunk runs a pack (packing) through the decoder with attention over segments; head says log-probs
without the logits. How it computes: precision chooses, products multiply by a weight, forwards puts the steps
of block_steps and elementwise in the place of modules' own; flops counts.
"""
