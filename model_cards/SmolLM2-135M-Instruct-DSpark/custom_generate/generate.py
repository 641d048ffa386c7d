"""The official spelling of assisted decoding with the drafter of this repo:

    target.generate(**inputs, assistant_model=drafter, custom_generate=<this repo>, trust_remote_code=True)
"""


def generate(model, assistant_model=None, **kwargs):
    if not hasattr(assistant_model, "decode_for"):
        raise ValueError("pass the DSpark drafter of this repo as `assistant_model=`.")
    return assistant_model.decode_for(model, **kwargs)
