def attention_forward(*args, **kwargs):
    raise NotImplementedError
