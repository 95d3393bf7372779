"""Looking at plans and proving them: parity, exports to other forms, pages.

In: a plan, a function, a compiled report. Out: tables, HTML, regex rules, annotations. Never knows:
training.
"""
