"""Models as Rein uses them: packed rows in, [B, T] tensors out. Knows no ranks, files of rows or rewards.

actor, critic, reward_model and reference are the roles; load, lora, identity and tiny make their models. A
pass: trunk runs a pack (packing) through the decoder with attention over segments; head says log-probs
without the logits. How it computes: precision chooses, products multiply by a weight, forwards puts the steps
of block_steps and elementwise in the place of modules' own; flops counts.
"""
