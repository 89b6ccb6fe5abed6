"""What processes of a world do with Keras's own fit, evaluate, predict and train_on_batch under its distributions; each
returns what it saw, as numpy and plain values.
"""

import traceback
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor
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
        found[name] = outcome(fitted, keras, compiled(keras), x, y, **arguments)
    for name in ("sgd", "clipnorm", "global_clipnorm", "adamw"):
        found[name] = outcome(fitted, keras, compiled(keras, name), x, y)
    found["regularizer"] = outcome(fitted, keras, compiled(keras, regularizer="l2"), x, y)
    found["dropout"] = outcome(fitted, keras, compiled(keras, dropout=0.5), x, y)
    return found


def fitted(keras, model, x, y, **arguments):
    history = model.fit(x, y, **{"batch_size": 8, "epochs": 2, "verbose": 0, **arguments}).history
    return {
        **state(model),
        **{f"history {name}": np.array(values) for name, values in history.items()},
        "predict": model.predict(x, batch_size=8, verbose=0),
    }


def outcome(attempt, *arguments, **options):
    """What it returns, or the error that it ends in."""
    try:
        return attempt(*arguments, **options)
    except Exception as error:
        return "".join(traceback.format_exception(error))[-4000:]


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
        "reshaped": (
            stack(layers.Rescaling(2.0), layers.Dense(4), layers.Reshape((2, 2)), layers.Permute((2, 1))),
            flat,
        ),
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

        def run(make=make, x=x):
            keras.utils.set_random_seed(3)
            model = make()
            model.compile(keras.optimizers.SGD(0.005), "mse")  # a step that diverges amplifies rounding
            y = np.random.default_rng(2).normal(size=(8, 2)).astype("float32")
            history = model.fit(x, y, batch_size=4, epochs=1, verbose=0).history
            renamed = {str(i): v.numpy() for i, v in enumerate(model.variables) if "seed" not in v.path}
            return {**renamed, "loss": np.array(history["loss"]), "predict": model.predict(x, verbose=0)}

        found[name] = outcome(run)
    return found


def data_of(kind, rank, replicas, table):
    """This process's rows where each has its own: of every batch of 8 its part, in order."""
    x, y = table
    each = 8 // replicas
    rows = [i for i in range(16) if (i % 8) // each == rank]
    return x[rows], y[rows]


def data_forms(kind):
    """Data that are shared out before they come to fit, and single batches."""
    keras = installed()
    spread = distribution(keras, kind)
    keras.distribution.set_distribution(spread)
    x, y = table()
    found = {}
    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=8, drop_last=True)
    shares = spread.distribute_dataset(loader) if spread else loader
    model = compiled(keras)
    history = model.fit(shares, verbose=0, shuffle=False, epochs=2).history
    found["distribute_dataset"] = {**state(model), "loss": np.array(history["loss"]), "rows": np.array(len(shares))}
    model = compiled(keras)
    own, each = (x[:16], y[:16]), 8
    if spread:
        spread.auto_shard_dataset = False
        replica = spread.device_mesh.backend_mesh.get_local_rank("batch")
        own, each = data_of(kind, replica, spread.num_model_replicas, (x, y)), 8 // spread.num_model_replicas
    model.fit(*own, batch_size=each, verbose=0, shuffle=False, epochs=2)
    found["own rows"] = {**state(model), "evaluate": np.array(model.evaluate(*own, batch_size=each, verbose=0))}
    if spread:
        spread.auto_shard_dataset = True
    model = compiled(keras)
    logs = [model.train_on_batch(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    logs += [model.test_on_batch(x, y)]
    found["on_batch"] = {**state(model), "logs": np.array(logs), "predict": model.predict_on_batch(x)}
    return found


def unseeded(kind):
    """Processes whose random states differ end alike: {name: value} after two shuffled epochs with dropout."""
    keras = installed()
    keras.distribution.set_distribution(distribution(keras, kind))
    keras.utils.set_random_seed(int(joined()))
    x, y = table()
    model = network(keras, dropout=0.5)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return {"model": fitted(keras, model, x, y)}


def own_models(kind, folder=None):
    """A train_step of one's own, several inputs and outputs, masks, metrics with state, checkpoints, optimizers."""
    keras = installed()
    keras.distribution.set_distribution(distribution(keras, kind))
    x, y = table()
    found = {}

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.up, self.out = keras.layers.Dense(16, name="up"), keras.layers.Dense(CLASSES)

        def call(self, inputs, training=False):
            hidden = self.up(inputs)
            self.add_loss(keras.ops.mean(keras.ops.square(hidden)))
            contrast = keras.ops.matmul(hidden, keras.ops.transpose(hidden))  # rows meet rows
            return self.out(hidden) + keras.ops.mean(contrast, axis=-1, keepdims=True)

        def train_step(self, data):
            rows, labels = data
            self.zero_grad()
            loss = self.compute_loss(y=labels, y_pred=self(rows, training=True))
            loss.backward()
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in weights], weights)
            for metric in self.metrics:
                metric.update_state(loss)
            return {m.name: m.result() for m in self.metrics}

    def own():
        keras.utils.set_random_seed(3)
        model = Own()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(x, y, batch_size=8, epochs=1, verbose=0).history
        return {**{str(i): v.numpy() for i, v in enumerate(model.weights)}, "loss": np.array(history["loss"])}

    def several():
        keras.utils.set_random_seed(3)
        tokens, dense = keras.Input((5,), name="tokens", dtype="int32"), keras.Input((FEATURES,), name="dense")
        embedded = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
        series = keras.layers.Dense(1, name="series")(embedded)
        hidden = keras.layers.Concatenate()([keras.layers.GlobalAveragePooling1D()(embedded), dense])
        hidden = keras.layers.Dense(16, activation="relu", name="up")(hidden)
        model = keras.Model(
            [tokens, dense], {"one": keras.layers.Dense(1, "sigmoid", name="one")(hidden), "series": series}
        )
        model.compile(
            "adam",
            {"one": "binary_crossentropy", "series": "mse"},
            loss_weights={"one": 1.0, "series": 0.3},
            metrics={"one": [keras.metrics.AUC(), keras.metrics.F1Score()], "series": ["mae"]},
        )
        numbers = np.random.default_rng(4)
        inputs = {"tokens": numbers.integers(0, 9, size=(ROWS, 5)), "dense": x}
        targets = {"one": (y[:, None] > 0).astype("float32"), "series": numbers.normal(size=(ROWS, 5, 1))}
        history = model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0).history
        predicted = model.predict(inputs, batch_size=8, verbose=0)
        return {
            **{str(i): v.numpy() for i, v in enumerate(model.weights)},
            **{f"history {name}": np.array(values) for name, values in history.items()},
            **predicted,
        }

    def checkpointed():
        model = compiled(keras)
        checkpoint = keras.callbacks.ModelCheckpoint(
            f"{folder}/{kind}/deep/epoch{{epoch}}.weights.h5", save_weights_only=True
        )
        logger = keras.callbacks.CSVLogger(f"{folder}/{kind}.csv")
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[checkpoint, logger])
        model.save(f"{folder}/{kind}.keras")
        again = keras.models.load_model(f"{folder}/{kind}.keras")
        lines = Path(f"{folder}/{kind}.csv").read_text().splitlines()
        other = compiled(keras)
        other.build((None, FEATURES))
        other.load_weights(f"{folder}/{kind}/deep/epoch2.weights.h5")
        again.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
        return {**state(again), "loaded": other.predict(x, verbose=0), "lines": np.array(len(lines))}

    found = {"own": outcome(own), "several": outcome(several)}
    if folder:
        found["checkpointed"] = outcome(checkpointed)
    return found


def optimizers(kind):
    """What each of Keras's optimizers leaves, plain and with accumulation, averages and scaled losses."""
    keras = installed()
    keras.distribution.set_distribution(distribution(keras, kind))
    x, y = table()
    every = keras.optimizers
    made = {
        name: getattr(every, name)
        for name in ("Adadelta", "Adagrad", "Adamax", "Adafactor", "Ftrl", "Lamb", "Lion", "Nadam", "RMSprop", "Muon")
    }
    cells = {name: lambda make=make: make(0.001) for name, make in made.items()}
    cells |= {
        "amsgrad": lambda: every.Adam(0.01, amsgrad=True, clipvalue=0.01),
        "nesterov": lambda: every.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "average": lambda: every.Adam(0.01, use_ema=True, ema_momentum=0.5),
        "accumulation": lambda: every.SGD(0.05, gradient_accumulation_steps=2),
        "scaled": lambda: every.LossScaleOptimizer(every.SGD(0.05)),
        "schedule": lambda: every.SGD(every.schedules.CosineDecay(0.1, 5)),
    }
    found = {}
    for name, make in cells.items():

        def run(make=make):
            keras.utils.set_random_seed(3)
            model = network(keras, normalization=False)
            model.compile(make(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return fitted(keras, model, x, y)

        found[name] = outcome(run)
    return found


def refusals():
    """The errors of what cannot be right on two processes, and where a callback of one process stops them both."""
    rank = joined()
    keras = installed()
    x, y = table()
    early = compiled(keras)
    early.build((None, FEATURES))
    spread = keras.distribution.DataParallel()
    keras.distribution.set_distribution(spread)
    model = compiled(keras)

    def batches(count, failing=False):
        for _ in range(count):
            yield x[:8], y[:8]
        if failing:
            raise OSError("the disk is gone")

    def other_rows():
        model.fit(x + rank, y, verbose=0)

    def ends_early():
        model.fit(batches(3 - rank), verbose=0)

    def fails():
        model.fit(batches(2, failing=rank == 1), verbose=0)

    def other_counts():
        model.fit(x[: 16 - 8 * rank], y[: 16 - 8 * rank], batch_size=8, verbose=0)

    def own_rows():
        spread.auto_shard_dataset = False
        try:
            model.fit(x[: 8 - rank], y[: 8 - rank], batch_size=8, verbose=0)
        finally:
            spread.auto_shard_dataset = True

    def unset():
        keras.distribution.set_distribution(None)
        try:
            model.predict(x, verbose=0)
        finally:
            keras.distribution.set_distribution(spread)

    def compiled_step():
        other = network(keras)
        other.compile("sgd", "mse", jit_compile=True)
        other.jit_compile = True
        other.fit(x, x[:, :CLASSES], verbose=0)

    def backup():
        model.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("nowhere")])

    def torch_module():
        keras.layers.TorchModuleWrapper(torch.nn.Linear(2, 2))

    def one_batch():
        model.train_on_batch(x[: 8 - rank], y[: 8 - rank])

    tries = (
        other_rows,
        ends_early,
        fails,
        other_counts,
        own_rows,
        unset,
        compiled_step,
        backup,
        torch_module,
        one_batch,
    )
    found = {"early": outcome(early.fit, x, y, verbose=0), **{attempt.__name__: outcome(attempt) for attempt in tries}}

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = rank == 1 and batch == 1

    steps = []
    counter = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Stop(), counter])
    weights = np.concatenate([value.ravel() for value in state(model).values()])
    devices = {
        "gpu": keras.distribution.list_devices("gpu"),
        "gpus": keras.distribution.get_device_count("gpu"),
        "mps": keras.distribution.list_devices("mps"),
    }
    seen = []

    class Probe(keras.layers.Layer):
        def call(self, inputs):
            if isinstance(inputs, DTensor):
                seen.append(inputs.to_local().shape[0])
            return inputs

    keras.Sequential([Probe()]).predict(x[:15], batch_size=8, verbose=0)
    return found, steps, weights, devices, seen
