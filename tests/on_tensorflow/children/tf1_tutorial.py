"""A training script as TF1's tutorials have it: placeholders, a Session, feed_dict; and the two lines."""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_v2_behavior()

rng = np.random.default_rng(0)
images = rng.standard_normal((256, 64)).astype("float32")
labels = np.argmax(images @ rng.standard_normal((64, 10)), axis=1)

x = v1.placeholder(tf.float32, [None, 64])
y_ = v1.placeholder(tf.int64, [None])
W1 = tf.Variable(tf.random.truncated_normal([64, 32], stddev=0.1, seed=1))
b1 = tf.Variable(tf.zeros([32]))
W2 = tf.Variable(tf.random.truncated_normal([32, 10], stddev=0.1, seed=2))
b2 = tf.Variable(tf.zeros([10]))
hidden = tf.nn.relu(tf.matmul(x, W1) + b1)
logits = tf.matmul(hidden, W2) + b2
cross_entropy = v1.losses.sparse_softmax_cross_entropy(labels=y_, logits=logits)
correct = tf.equal(tf.argmax(logits, 1), y_)
accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))

opt = tf.train.AdamOptimizer(1e-2)
opt = tf.train.experimental.enable_mixed_precision_graph_rewrite(opt)
global_step = tf.train.get_or_create_global_step()
train_step = opt.minimize(cross_entropy, global_step=global_step)

with v1.Session(config=v1.ConfigProto(allow_soft_placement=True)) as sess:
    sess.run(v1.global_variables_initializer())
    for step in range(60):
        batch = slice(step % 4 * 64, step % 4 * 64 + 64)
        sess.run(train_step, feed_dict={x: images[batch], y_: labels[batch]})
    print("steps", sess.run(global_step))
    print("accuracy", sess.run(accuracy, feed_dict={x: images, y_: labels}))
    metadata = v1.RunMetadata()
    sess.run(
        train_step,
        feed_dict={x: images, y_: labels},
        options=v1.RunOptions(output_partition_graphs=True),
        run_metadata=metadata,
    )
    products = [n for g in metadata.partition_graphs for n in g.node if n.op.endswith("MatMul")]
    print("products", sorted({tf.dtypes.as_dtype(n.attr["T"].type).name for n in products}))
