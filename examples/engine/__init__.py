"""A small training engine with the field report's checkpoint code, to see what coordination changes there.

Read in this order: ``engine.yaml``, ``checkpoint/distributed.py``, ``checkpoint/dcp.py``, ``train.py``; then
``ab.py``, the report's experiment. The model, FSDP2 with an expert-parallel part, is the demo's.
"""
