"""Check rules, one file per subject; `rule.rules` imports every file of this folder and lists them."""

# `tools/make_reference.py` writes this list. Look here before you write a rule: it may be one of these.
#
# adapter.py
#     B060  error    an adapter leaves a tied pair tied
#     B061  error    an adapter's tables have the shape of the base's
#     B062  error    an adapter's modules are modules of the base
#     B063  info     an adapter stores no row that the base has
#     B064  info     engines that serve adapters serve this one
#
# custom_code.py
#     B023  error    the code that comes with a checkpoint ties as transformers 5 asks
#
# drafts.py
#     B083  error    a draft's maps lead each row to a different token
#     B084  error    a draft has the rows that its config and its target say
#     B085  error    a draft's ids are the target's
#
# files.py
#     B001  fatal    every file can be read, and every header describes exactly its file
#     B002  fatal    the index and the shard files name the same tensors
#     B003  warning  total_size is right, and the folder holds no older weights
#     B004  error    no name is in two shard files
#
# flags.py
#     B020  warning  the flag is written, as true or false
#     B021  error    all levels of a nested config say the same
#     B022  error    a T5-like model has one input table, and a flag that fits its head
#     B080  warning  every loader makes the same model of it
#
# gguf.py
#     B070  error    a GGUF file keeps its source's two ends
#     B071  warning  a GGUF file stores a shared table once, and finely enough
#
# onnx.py
#     B100  warning  an ONNX file stores a shared table once
#     B101  error    an exported model has its head
#
# other_tensors.py
#     B036  error    the class finds all its tensors outside the embedding and head
#
# quantisation.py
#     B050  error    a quantisation treats both ends of a tied pair alike
#     B051  warning  modules that a quantisation leaves alone exist in the model
#     B052  warning  a packed head is stored with its scale, and is read with it
#     B053  warning  a planned quantisation packs both ends of a tied pair, or neither
#     B054  error    both ends are packed as the quantisation says
#
# table_sizes.py
#     B017  error    every table that a token id indexes has the rows that ids need
#     B030  fatal    both tables have the shapes that the model needs
#     B033  error    vocab_size is the number of rows
#     B035  warning  the head's bias is as long as the vocabulary, and one
#
# token_ids.py
#     B031  fatal    every id of the tokenizer has a row
#     B032  info     rows without a token are padding
#     B034  warning  special ids are inside the vocabulary
#
# tying.py
#     B010  fatal    the input table is stored under a name that a loader knows
#     B011  fatal    an untied model stores its output head
#     B012  error    a tied model stores no head that differs from its table
#     B013  warning  a tied model stores its table once
#     B014  info     an untied model's two tables are not the same
#     B015  warning  two stored tables are equal, or separately trained
#     B016  error    a single shared table is stored under the input table's name
#     B018  warning  a table of layers for further tokens equals the main one, or is separate
#     B019  error    the layers between the body and the head are stored
#     B090  info     no scale, cap or row normalisation acts at the ends
#
# types_and_rows.py
#     B040  warning  types agree: both tables with each other, and the config with the bytes
#     B041  error    rows of tokens in use are finite, not zero, and not equal to one another
#     B042  info     the number of rows divides by 64
#     B043  error    the tables are not all zeros
#     B081  info     no large tensor is stored twice
