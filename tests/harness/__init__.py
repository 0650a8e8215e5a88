"""A CPU harness around SGLang's own scheduler; `engine.make_scheduler` is the entrance.

SGLang is imported only by `bootstrap` and `engine`, so the reference model can be used without it.
"""
