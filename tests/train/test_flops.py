from jaxtrl.model.config import Qwen3Config
from jaxtrl.train.flops import forward_flops, linear_parameters, train_flops
from tests.fixture_t import CONFIG, shapes


def test_linear_parameters_are_the_matrices_of_the_checkpoint():
    count = sum(s[0] * s[1] for name, s in shapes().items() if len(s) == 2 and "embed" not in name)
    assert linear_parameters(Qwen3Config.from_dict(CONFIG)) == count


def test_forward_and_train_flops_by_hand():
    config = Qwen3Config.from_dict(CONFIG)
    once = forward_flops(config, tokens=10, pairs=100, slots=4)
    assert once.head == 2 * 4 * 64 * 32
    assert once.attention == 2 * (2 * 2 * 100 * 4 * 16)
    saved = train_flops(config, 10, 100, 4, remat="matmuls")
    full = train_flops(config, 10, 100, 4, remat="full")
    assert saved.linear == 3 * once.linear
    assert full.linear == 4 * once.linear
    assert saved.total == 3 * once.linear + 3.5 * once.attention + 3 * once.head
