"""Generation: prompts in, answers out, by two programs from one plan.

In: a placed model, prompts as text or token ids. Out: tokens, their log-probabilities, text.
Never knows: training.
"""
