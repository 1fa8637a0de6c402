def attention_backward(*args, **kwargs):
    raise NotImplementedError
