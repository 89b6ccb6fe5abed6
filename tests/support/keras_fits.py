"""What processes of a world do with Keras's own fit, evaluate, predict and train_on_batch under its distributions; each
returns what it saw, as numpy and plain values.
"""

import traceback

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.steps_on_ranks import joined

ROWS, FEATURES, CLASSES = 22, 6, 3  # batches of 8 leave 6 rows


def table():
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, FEATURES)).astype("float32")
    y = numbers.integers(CLASSES, size=ROWS)
    return x, y


def installed():
    joined()
    import keras

    from anyqlora.distribution import keras as bridge

    bridge.install()
    return keras


def distribution(keras, kind):
    """ "data", "model" (all processes split variables), "both" (a mesh of two rows), or None."""
    if kind is None:
        return None
    if kind == "data":
        return keras.distribution.DataParallel()
    count = len(keras.distribution.list_devices())
    shape = {"model": (1, count), "both": (2, count // 2)}[kind]
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ("batch", "model")))
    layouts[".*up/kernel"] = (None, "model")
    layouts[".*up/bias"] = ("model",)
    layouts[".*down/kernel"] = ("model", None)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def network(keras, dropout=0.0, normalization=True, regularizer=None):
    layers = [
        keras.layers.Dense(16, activation="gelu", name="up", kernel_regularizer=regularizer),
        *([keras.layers.BatchNormalization(name="norm")] if normalization else []),
        *([keras.layers.Dropout(dropout)] if dropout else []),
        keras.layers.Dense(8, name="down"),
        keras.layers.Dense(CLASSES, name="out"),
    ]
    return keras.Sequential(layers, name="model")


def optimizer(keras, name):
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
        "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
        "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    }[name]()


def compiled(keras, name="adam", **network_options):
    keras.utils.set_random_seed(3)
    model = network(keras, **network_options)
    model.compile(
        optimizer(keras, name),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")],
    )
    return model


def state(model):
    return {v.path: v.numpy() for v in model.variables if "seed" not in v.path}


def feeds(keras, kind):
    """The arguments of fit for each way to hand over the same rows."""
    x, y = table()

    def batches():
        for start in range(0, ROWS, 8):
            yield x[start : start + 8], y[start : start + 8]

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, number):
            return x[8 * number : 8 * number + 8], y[8 * number : 8 * number + 8]

    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=8)
    return {
        "arrays": lambda: {"x": x, "y": y, "batch_size": 8, "shuffle": False},
        "loader": lambda: {"x": loader, "shuffle": False},
        "generator": lambda: {"x": batches()},
        "dataset": lambda: {"x": Rows(), "shuffle": False},
    }


def fits(kind, names=None):
    """What each way to train leaves: {name: {"weights": ..., "history": ..., ...}}."""
    keras = installed()
    keras.distribution.set_distribution(distribution(keras, kind))
    x, y = table()
    found = {}
    for name, arguments in feeds(keras, kind).items():
        model = compiled(keras)
        history = model.fit(**arguments(), epochs=1, verbose=0).history
        found[name] = {**state(model), **{f"history {k}": np.array(v) for k, v in history.items()}}
    model = compiled(keras)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    found["shuffled"] = {
        **state(model),
        "evaluate": np.array(model.evaluate(x, y, batch_size=8, verbose=0)),
        "predict": model.predict(x, batch_size=8, verbose=0),
    }
    return found


def options(kind):
    """What fit leaves with each of its options, and with each optimizer."""
    keras = installed()
    keras.distribution.set_distribution(distribution(keras, kind))
    x, y = table()
    weights = np.linspace(0.1, 2, ROWS).astype("float32")
    cells = {
        "validation_split": {"validation_split": 0.3},
        "validation_data": {"validation_data": (x[:5], y[:5])},
        "sample_weight": {"sample_weight": weights},
        "class_weight": {"class_weight": {0: 0.2, 1: 3.0, 2: 1.0}},
        "steps": {"steps_per_epoch": 2, "epochs": 3},
        "callbacks": {
            "validation_split": 0.3,
            "epochs": 6,
            "callbacks": [
                keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True, min_delta=0.02),
                keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=10),
                keras.callbacks.TerminateOnNaN(),
            ],
        },
    }
    found = {}
    for name, arguments in cells.items():
        found[name] = outcome(lambda: fitted(keras, compiled(keras), x, y, **arguments))
    for name in ("sgd", "clipnorm", "global_clipnorm", "adamw"):
        found[name] = outcome(lambda: fitted(keras, compiled(keras, name), x, y))
    found["regularizer"] = outcome(lambda: fitted(keras, compiled(keras, regularizer="l2"), x, y))
    found["dropout"] = outcome(lambda: fitted(keras, compiled(keras, dropout=0.5), x, y))
    return found


def fitted(keras, model, x, y, **arguments):
    history = model.fit(x, y, **{"batch_size": 8, "epochs": 2, "verbose": 0, **arguments}).history
    return {
        **state(model),
        **{f"history {name}": np.array(values) for name, values in history.items()},
        "predict": model.predict(x, batch_size=8, verbose=0),
    }


def outcome(attempt):
    """What it returns, or the error that it ends in."""
    try:
        return attempt()
    except Exception as error:
        return "".join(traceback.format_exception(error))[-1500:]


def architectures(keras):
    """{name: (model, x, y)} of small models, one for each kind of layer."""
    layers, numbers = keras.layers, np.random.default_rng(1)
    image = numbers.normal(size=(8, 8, 8, 3)).astype("float32")
    series = numbers.normal(size=(8, 5, 6)).astype("float32")
    tokens = numbers.integers(0, 9, size=(8, 5))
    flat = numbers.normal(size=(8, 6)).astype("float32")

    def stack(*parts):
        return lambda: keras.Sequential([*parts, layers.Flatten(), layers.Dense(2, name="down")])

    def attention():
        x = keras.Input((5, 6))
        h = layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x, use_causal_mask=True)
        h = layers.LayerNormalization()(layers.Add()([x, h]))
        return keras.Model(x, layers.Dense(2, name="down")(layers.Flatten()(h)))

    def grouped():
        x = keras.Input((5, 8))
        h = layers.GroupQueryAttention(4, 4, 2, flash_attention=None)(x, x)
        return keras.Model(x, layers.Dense(2, name="down")(layers.Flatten()(h)))

    return {
        "conv": (stack(layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization(), layers.MaxPooling2D()), image),
        "strided": (stack(layers.Conv2D(4, 3, strides=2, padding="same", activation="relu")), image),
        "average": (stack(layers.Conv2D(4, 3), layers.AveragePooling2D(2)), image),
        "global_average": (stack(layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()), image),
        "separable": (stack(layers.SeparableConv2D(4, 3)), image),
        "depthwise": (stack(layers.DepthwiseConv2D(3)), image),
        "transpose": (stack(layers.Conv2DTranspose(4, 3, strides=2)), image),
        "up": (stack(layers.Conv2D(4, 3), layers.UpSampling2D()), image),
        "group_norm": (stack(layers.Conv2D(4, 3), layers.GroupNormalization(2)), image),
        "conv1d": (stack(layers.Conv1D(4, 3, padding="causal")), series),
        "lstm": (stack(layers.LSTM(4)), series),
        "gru": (stack(layers.Bidirectional(layers.GRU(4, return_sequences=True))), series),
        "rnn": (stack(layers.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.3)), series),
        "masked": (stack(layers.Embedding(9, 4, mask_zero=True), layers.LSTM(4)), tokens),
        "embedding": (stack(layers.Embedding(9, 4)), tokens),
        "attention": (attention, series),
        "grouped": (grouped, np.concatenate([series, series[..., :2]], -1)),
        "time": (stack(layers.TimeDistributed(layers.Dense(3, activation="relu"))), series),
        "einsum": (stack(layers.EinsumDense("abc,cd->abd", output_shape=(5, 4), bias_axes="d")), series),
        "rms": (stack(layers.RMSNormalization()), flat),
        "spectral": (stack(layers.SpectralNormalization(layers.Dense(4))), flat),
        "unit": (stack(layers.Dense(4), layers.UnitNormalization()), flat),
        "noise": (stack(layers.Dense(4), layers.GaussianNoise(0.3), layers.GaussianDropout(0.2)), flat),
        "alpha": (stack(layers.Dense(4), layers.AlphaDropout(0.2), layers.SpatialDropout1D(0.2)), series),
        "prelu": (stack(layers.Dense(4), layers.PReLU(), layers.Softmax()), flat),
        "activity": (stack(layers.Dense(4, activity_regularizer="l2")), flat),
        "constraint": (stack(layers.Dense(4, kernel_constraint="max_norm")), flat),
        "discretized": (stack(layers.Rescaling(2.0), layers.Dense(4), layers.Reshape((2, 2)), layers.Permute((2, 1))), flat),
        "normalized": (stack(layers.Normalization(mean=0.5, variance=2.0), layers.Dense(4)), flat),
    }


def layered(kind, only=None):
    """Weights and predictions after two steps of each of the architectures."""
    keras = installed()
    keras.distribution.set_distribution(distribution(keras, kind))
    found = {}
    keras.utils.set_random_seed(5)
    for name, (make, x) in architectures(keras).items():
        if only and name not in only:
            continue

        def run():
            keras.utils.set_random_seed(3)
            model = make()
            model.compile(keras.optimizers.SGD(0.05), "mse")
            y = np.random.default_rng(2).normal(size=(8, 2)).astype("float32")
            history = model.fit(x, y, batch_size=4, epochs=1, verbose=0).history
            renamed = {str(i): v.numpy() for i, v in enumerate(model.variables) if "seed" not in v.path}
            return {**renamed, "loss": np.array(history["loss"]), "predict": model.predict(x, verbose=0)}

        found[name] = outcome(run)
    return found
