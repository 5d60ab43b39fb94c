"""Graphs with loops and tensor lists, added to `tf_graphs.GRAPHS` when this is imported."""

from __future__ import annotations

import tensorflow as tf
from tf_graphs import f32, step, traced, variable


def listed(x):
    return tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[3])


def stacked(full):
    return tf.raw_ops.TensorListStack(input_handle=full, element_shape=[3], element_dtype=tf.float32)


@traced(f32(4, 6, 3))
def tensor_array_loop():
    w, u = variable(3, 5), variable(5, 5)

    def forward(x):
        h = tf.zeros([4, 5])
        outputs = tf.TensorArray(tf.float32, 6)
        for t in tf.range(6):
            h = tf.tanh(x[:, t] @ w + h @ u)
            outputs = outputs.write(t, h)
        return outputs.stack() @ u

    return forward


@traced(f32(4, 6, 3))
def loop_step():
    w, u = variable(3, 5), variable(5, 5)

    def forward(x):
        h = tf.zeros([4, 5])
        for t in tf.range(6):
            h = tf.tanh(x[:, t] @ w + h @ u)
        return tf.reduce_mean(h**2)

    return step(forward, [w, u])


@traced(f32(4, 6, 3))
def lists_between_products():
    w = variable(3, 3)

    def forward(x):
        return tf.nn.relu(stacked(listed(tf.reshape(x, [-1, 3]) @ w))) @ w

    return forward


@traced(f32(4, 3))
def list_from_exp():
    w = variable(3, 3)

    def forward(x):
        first = listed(tf.exp(x @ w))
        first = tf.raw_ops.TensorListSetItem(input_handle=first, index=0, item=(x @ w)[0])
        return stacked(first) @ w

    return forward


@traced(f32(4, 3))
def deny_through_a_list():
    w = variable(3, 3)

    def forward(x):
        return tf.tanh(stacked(listed(tf.exp(x @ w)))) @ w

    return forward


@traced(f32(4, 3))
def list_that_leaves():
    w = variable(3, 3)

    def forward(x):
        first = listed(x @ w)

        @tf.function(autograph=False)
        def called(given):
            return tf.identity(given)

        kept = called(first)
        return stacked(first) @ w, kept

    return forward


@traced(f32(4, 3), f32(4, 3))
def two_lists():
    w = variable(3, 3)

    def forward(x, y):
        plain, other = listed(tf.cos(x)), listed(y @ w)
        both = tf.raw_ops.TensorListConcatLists(input_a=plain, input_b=plain, element_dtype=tf.float32)
        length, item = tf.raw_ops.TensorListPopBack(
            input_handle=other, element_shape=[3], element_dtype=tf.float32
        )
        return tf.sin(stacked(both)), tf.reshape(item, [1, 3]) @ w, length

    return forward
