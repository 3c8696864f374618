"""Low-rank experts: smaller ones in place of a model's own, made once (`nanovllm compress`) and served by the engine.

format.py       names, shapes and metadata.json of a folder of low-rank experts
folder.py       such a folder on disk, and the proof that it belongs to the model beside it
checkpoint.py   a model's tensors with these experts in place of its own, as the weight loader reads them
compress/       makes the folder; the engine does not import it
"""
