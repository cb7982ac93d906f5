"""Files of pretrained word vectors, one module per format; `read.py` tells them apart by their bytes."""
