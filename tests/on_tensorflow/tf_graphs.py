"""Graphs as people write them, for the comparison with TensorFlow's pass: name -> a function that builds a GraphDef."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

GRAPHS: dict[str, Callable[[], Any]] = {}


def f32(*shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


def i32(*shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.int32)


def traced(*specs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function, traced with `specs`. A function that takes a `make` argument builds what it needs first."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        GRAPHS[function.__name__] = lambda: (
            tf.function(function()).get_concrete_function(*specs).graph.as_graph_def()
        )
        return function

    return register


def variable(*shape: int) -> tf.Variable:
    return tf.Variable(tf.zeros(shape))


def step(forward: Callable[..., Any], weights: list[tf.Variable], rate: float = 0.1) -> Callable[..., Any]:
    """A training step with gradients and plain SGD."""

    def run(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = forward(*batch)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(rate * tf.convert_to_tensor(gradient))
        return loss

    return run


@traced(f32(4, 8))
def dense():
    w, b = variable(8, 3), variable(3)
    return lambda x: tf.nn.relu(tf.nn.bias_add(x @ w, b))


@traced(f32(4, 8), i32(4))
def dense_step():
    w, b, v = variable(8, 6), variable(6), variable(6, 3)

    def forward(x, y):
        h = tf.nn.relu(tf.nn.bias_add(x @ w, b))
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h @ v))

    return step(forward, [w, b, v])


@traced(f32(2, 8, 8, 3), f32(2, 5))
def conv_batch_norm_step():
    k, scale, shift, w = variable(3, 3, 3, 4), variable(4), variable(4), variable(4, 5)

    def forward(x, y):
        h = tf.nn.conv2d(x, k, 1, "SAME")
        h, _, _ = tf.compat.v1.nn.fused_batch_norm(h, scale, shift, is_training=True)
        h = tf.nn.max_pool2d(tf.nn.relu(h), 2, 2, "SAME")
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, tf.reduce_mean(h, [1, 2]) @ w))

    return step(forward, [k, scale, shift, w])


@traced(f32(2, 8, 8, 3))
def depthwise_and_pools():
    k, d = variable(3, 3, 3, 2), variable(3, 3, 6, 1)

    def forward(x):
        h = tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME")
        h = tf.nn.avg_pool2d(tf.nn.leaky_relu(h), 2, 2, "SAME")
        h = tf.nn.depthwise_conv2d(h, d, [1, 1, 1, 1], "SAME")
        return tf.pad(h, [[0, 0], [1, 1], [1, 1], [0, 0]])

    return forward


@traced(f32(1, 4, 4, 4, 2), f32(1, 2, 2, 2, 2))
def conv3d_step():
    k = variable(3, 3, 3, 2, 2)
    return step(
        lambda x, y: tf.reduce_sum(
            (tf.nn.avg_pool3d(tf.nn.conv3d(x, k, [1] * 5, "SAME"), 2, 2, "SAME") - y) ** 2
        ),
        [k],
    )


@traced(f32(2, 5, 8))
def attention():
    q, k, v, o = (variable(8, 2, 4) for _ in range(4))

    def forward(x):
        a, b, c = (tf.einsum("btd,dhe->bthe", x, w) for w in (q, k, v))
        scores = tf.nn.softmax(tf.einsum("bthe,bshe->bhts", a, b) * 0.5)
        return tf.einsum("bthe,dhe->btd", tf.einsum("bhts,bshe->bthe", scores, c), o)

    return forward


@traced(f32(2, 5, 8), i32(2, 5))
def attention_step():
    q, o = variable(8, 8), variable(8, 7)

    def forward(x, y):
        h = tf.matmul(
            tf.nn.softmax(tf.matmul(x, x, transpose_b=True) / 2.8),
            tf.reshape(tf.reshape(x, [-1, 8]) @ q, [2, 5, 8]),
        )
        mean, variance = tf.nn.moments(h, [-1], keepdims=True)
        h = (h - mean) * tf.math.rsqrt(variance + 1e-3)
        logits = tf.reshape(h, [-1, 8]) @ o
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(y, [-1]), logits))

    return step(forward, [q, o])


@traced(f32(4, 3), tf.TensorSpec((), tf.bool))
def cond_with_products():
    w = variable(3, 3)
    return lambda x, flag: tf.cond(flag, lambda: tf.nn.relu(x @ w), lambda: tf.exp(x)) @ w


@traced(f32(4, 3), i32())
def switch_case():
    w = variable(3, 3)
    return lambda x, n: tf.switch_case(n, [lambda: x @ w, lambda: tf.tanh(x), lambda: x * 2.0]) @ w


@traced(f32(4, 3))
def calls():
    w = variable(3, 3)

    @tf.function
    def block(x):
        return tf.nn.relu(x @ w)

    return lambda x: block(block(x)) + tf.exp(block(x))


@traced(f32(4, 3), tf.TensorSpec((4,), tf.string))
def strings_and_ints():
    w = variable(3, 3)

    def forward(x, words):
        rows = tf.strings.to_number(tf.strings.substr(words, 0, 1), tf.int32)
        picked = tf.gather(x @ w, rows)
        return tf.strings.as_string(tf.argmax(picked @ w, 1)), tf.one_hot(rows, 3) @ w

    return forward


@traced(f32(6, 3))
def many_outputs():
    w = variable(3, 4)

    def forward(x):
        h = x @ w
        top, where = tf.math.top_k(h, 2)
        a, b = tf.split(tf.concat([h, -h], 1), 2, axis=1)
        p, q = tf.identity_n([a, b])
        r = tf.unstack(p, axis=1)[0]
        values, inverse = tf.unique(tf.reshape(where, [-1]))
        return tf.matmul(top, w[:2]), q @ tf.transpose(w), r, values, inverse, tf.nn.moments(h, [0])

    return forward


@traced(f32(4, 3))
def deny_through_infer():
    w = variable(3, 3)

    def forward(x):
        h = tf.exp(x @ w)
        h = tf.nn.relu(h + 1.0) * 2.0
        return (
            tf.reshape(h, [-1, 3]) @ w,
            tf.math.log(tf.reduce_sum(tf.exp(x @ w), 1)),
            tf.tanh((x @ w) ** 3.0),
        )

    return forward


@traced(f32(4, 3))
def deny_without_a_sequel():
    w = variable(3, 3)

    def forward(x):
        return (
            tf.reshape(tf.nn.relu(tf.exp(x @ w)), [3, 4]),
            tf.nn.relu(tf.reshape(x @ w, [3, 4])),
            tf.tanh(x @ w),
        )

    return forward


@traced(f32(4, 3))
def off_every_list():
    w = variable(3, 3)
    return lambda x: tf.cos(tf.nn.relu(x @ w)) @ w + tf.math.erf(tf.nn.gelu(x @ w)) @ w


@traced(f32(4, 3))
def no_half_kernel():
    w = variable(3, 3)

    def forward(x):
        h = x @ w
        counts = tf.raw_ops.ReverseSequence(input=h, seq_lengths=[1, 2, 3, 1], seq_dim=1, batch_dim=0)
        parts = tf.dynamic_partition(counts, [0, 1, 0, 1], 2)
        back = tf.dynamic_stitch([[0, 2], [1, 3]], parts)
        return tf.linalg.inv(h[:3]) @ w, back @ w, tf.nn.lrn(tf.reshape(h, [1, 1, 4, 3])), tf.nn.selu(h) @ w

    return forward


@traced(f32(4, 3), tf.TensorSpec((4, 3), tf.float16), tf.TensorSpec((4, 3), tf.float64))
def sixteen_bits_already():
    w = variable(3, 3)
    half, double = tf.Variable(tf.zeros((3, 3), tf.float16)), tf.Variable(tf.zeros((3, 3), tf.float64))

    def forward(x, y, z):
        a = tf.cast(y @ half, tf.float32) @ w
        b = tf.cast(tf.nn.relu(z @ double), tf.float32)
        return tf.nn.relu(a) @ w + tf.cast(tf.tanh(tf.cast(x @ w, tf.float16)), tf.float32), tf.tanh(b), b @ w

    return forward


@traced(f32(4, 3))
def casts_from_ints():
    w = variable(3, 3)

    def forward(x):
        n = tf.cast(tf.argsort(x, axis=1), tf.float32)
        m = tf.cast(x > 0, tf.float32)
        return n @ w, m @ w + tf.cos(m)

    return forward


@traced(f32(4, 3))
def control_dependencies():
    w = variable(3, 3)

    def forward(x):
        h = x @ w
        with tf.control_dependencies([w.assign_add(tf.ones((3, 3))), tf.debugging.assert_all_finite(h, "h")]):
            y = tf.nn.relu(tf.identity(h)) @ w
        tf.print("sum", tf.reduce_sum(y))
        return y

    return forward


@traced(f32(4, 3), f32(4, 3))
def placed_by_hand():
    w = variable(3, 3)

    def forward(x, y):
        with tf.device("/device:CPU:0"):
            a = tf.nn.relu(x @ w) @ w
        with tf.device("/device:GPU:0"):
            b = tf.tanh(a + 1.0) @ w
        with tf.device("/job:localhost/replica:0/task:0/device:GPU:0"):
            c = tf.identity(b) @ w
        return tf.nn.relu(c) @ w

    return forward


@traced(f32(4, 16))
def batch_products_and_slices():
    w = variable(2, 4, 4)

    def forward(x):
        h = tf.reshape(x, [2, 8, 4])
        h = tf.matmul(h, w)[:, ::2, :]
        h = tf.where(h > 0, h, tf.zeros_like(h))
        h = tf.clip_by_value(tf.stack([h, h], 0)[0], -1.0, 1.0)
        return tf.matmul(tf.transpose(h, [0, 2, 1]), h), tf.tile(tf.expand_dims(h, 0), [2, 1, 1, 1])

    return forward


@traced(f32(4, 8), f32(4, 8))
def custom_gradient_and_stop():
    w = variable(8, 8)

    @tf.custom_gradient
    def through(x):
        return tf.round(x), lambda dy: dy * 2.0

    return step(lambda x, y: tf.nn.l2_loss(tf.stop_gradient(through(x @ w)) - y @ w + through(y)), [w])


@traced(f32(3, 6, 4), i32(3))
def keras_lstm():
    import keras

    layer = keras.Sequential([keras.layers.LSTM(5, return_sequences=True), keras.layers.Dense(2)])
    layer.build((3, 6, 4))
    return lambda x, y: layer(x)


@traced(f32(2, 8, 8, 3), i32(2))
def keras_step():
    import keras

    layers = keras.layers
    model = keras.Sequential([
        layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dropout(0.2), layers.Dense(6, activation="gelu"), layers.LayerNormalization(),
        layers.Dense(3),
    ])  # fmt: skip
    model.build((None, 8, 8, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def run(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables))
        return value

    return run


@traced(f32(2, 6, 8), f32(2, 6, 8))
def keras_attention_step():
    import keras

    inputs = keras.Input((6, 8))
    out = keras.layers.MultiHeadAttention(2, 4)(inputs, inputs)
    out = keras.layers.Dense(8, activation="silu")(keras.layers.LayerNormalization()(out + inputs))
    model = keras.Model(inputs, out)
    weights = [v.value for v in model.trainable_variables]
    return step(lambda x, y: tf.reduce_mean(tf.square(model(x, training=True) - y)), weights)


def in_graph_mode(build: Callable[[], Any]) -> Callable[[], Any]:
    def graph_def() -> Any:
        with tf.Graph().as_default() as graph:
            build()
        return graph.as_graph_def()

    GRAPHS[build.__name__] = graph_def
    return build


@in_graph_mode
def reference_variables_step():
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, (4, 3))
    w = v1.get_variable("w", (3, 3), use_resource=False)
    b = v1.get_variable("b", (3,), use_resource=False)
    loss = tf.reduce_mean(
        tf.nn.relu(tf.identity(w.read_value() if hasattr(w, "read_value") else w) @ x[:3] + b) ** 2
    )
    v1.train.GradientDescentOptimizer(0.1).minimize(loss)


@in_graph_mode
def old_while_loop():
    v1 = tf.compat.v1
    v1.disable_control_flow_v2()
    try:
        x = v1.placeholder(tf.float32, (3, 3))
        w = v1.get_variable("w", (3, 3), use_resource=True)
        _, out = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, tf.nn.relu(h @ w)), [0, x])
        _, sums = tf.while_loop(
            lambda i, h: i < 4, lambda i, h: (i + 1, tf.exp(h @ w)), [0, tf.nn.relu(out @ w)]
        )
        tf.gradients(tf.identity(out @ w) + sums, [x])
    finally:
        v1.enable_control_flow_v2()


@in_graph_mode
def old_batch_norm():
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, (2, 4, 4, 3))
    k = v1.get_variable("k", (3, 3, 3, 3), use_resource=True)
    h = tf.nn.conv2d(x, k, 1, "SAME")
    y, *_ = tf.raw_ops.FusedBatchNorm(
        x=h, scale=[1.0] * 3, offset=[0.0] * 3, mean=[], variance=[], is_training=True
    )
    tf.nn.conv2d(tf.nn.relu(y), k, 1, "SAME", name="out")
