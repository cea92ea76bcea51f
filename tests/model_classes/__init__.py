"""Every class of text models that people train, compared with transformers and PEFT."""
