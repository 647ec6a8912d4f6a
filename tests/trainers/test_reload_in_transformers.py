"""A checkpoint made by Transformers, fine-tuned here, loads in Transformers and gives the same loss."""

import pytest

from jaxtrl.assets import sample_data_path
from jaxtrl.rows.sources import load_source
from tests.fixture_t import CONFIG


@pytest.mark.torch
@pytest.mark.slow
def test_fine_tuned_model_gives_the_same_loss_in_transformers(make_trainer, tiny_tokenizer, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**CONFIG, "vocab_size": len(tiny_tokenizer)})
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "start")
    tiny_tokenizer.save_pretrained(tmp_path / "start")
    rows = load_source(sample_data_path()).select(range(24))
    trainer = make_trainer(
        num_train_epochs=1,
        per_device_train_batch_size=4,
        pad_to_multiple_of="fixed:512",
        trainer={
            "model": str(tmp_path / "start"),
            "train_dataset": rows,
            "eval_dataset": rows.select(range(4)),
            "processing_class": None,
        },
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.save_model()
    after = trainer.evaluate()["eval_loss"]
    assert after < before - 0.5

    folder = trainer.args.output_dir
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for row in rows.select(range(4)):
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)])
        with torch.no_grad():
            total += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
    assert after == pytest.approx(total / tokens, rel=1e-5)
