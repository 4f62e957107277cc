"""Keras 3 on PyTorch: its own fit, optimizer and layers."""

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np
from script_arguments import args, keep, show, timed


class Losses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        show(logs["loss"])


keras.utils.set_random_seed(0)
model = keras.Sequential([
    keras.layers.Input((32, 32, 3)), keras.layers.Conv2D(24, 3, padding="same"), keras.layers.BatchNormalization(),
    keras.layers.ReLU(), keras.layers.Conv2D(24, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D(),
    keras.layers.Conv2D(48, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D(), keras.layers.Flatten(),
    keras.layers.Dropout(0.3), keras.layers.Dense(10),
])  # fmt: skip
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.AdamW(1e-3, clipnorm=1.0), loss=loss)
generator = np.random.default_rng(0)
images, labels = generator.normal(size=(256, 32, 32, 3)).astype("float32"), generator.integers(0, 10, 256)
with timed():
    model.fit(images, labels, batch_size=16, epochs=args.steps // 16, verbose=0, callbacks=[Losses()])
keep(model)
