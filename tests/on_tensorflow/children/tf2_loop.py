"""The two lines in a script of today: one loop in a tf.function, one eager."""

import tensorflow as tf

w = tf.Variable(tf.random.stateless_normal([64, 1], [1, 2]))
x = tf.random.stateless_normal([128, 64], [3, 4])
y = tf.matmul(x, tf.ones([64, 1]))

opt = tf.train.GradientDescentOptimizer(0.2)
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(
    opt, tf.train.experimental.DynamicLossScale(increment_period=5)
)


def loss():
    return tf.reduce_mean((tf.matmul(x, w) - y) ** 2)


@tf.function
def step():
    with tf.GradientTape() as tape:
        scaled = opt.get_scaled_loss(loss())
    gradients = opt.get_unscaled_gradients(tape.gradient(scaled, [w]))
    opt.apply_gradients(zip(gradients, [w]))


print("before", float(loss()))
for _ in range(50):
    step()
for _ in range(50):
    opt.minimize(loss, var_list=[w])
print("after", float(loss()))
print("scale", float(opt.loss_scale))
tf.train.experimental.disable_mixed_precision_graph_rewrite()
