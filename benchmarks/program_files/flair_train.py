"""flair: a tagger with a CRF on a transformer's words, by its ModelTrainer; sentences have other lengths each time."""

import random

import flair
from flair.data import Corpus, Sentence
from flair.datasets import FlairDatapointDataset
from flair.embeddings import TransformerWordEmbeddings
from flair.models import SequenceTagger
from flair.trainers import ModelTrainer
from flair.trainers.plugins import TrainerPlugin
from script_arguments import args, keep, show, timed


class Losses(TrainerPlugin):
    @TrainerPlugin.hook
    def metric_recorded(self, record):
        if str(record.name).endswith("batch_loss"):
            show(record.value)


flair.set_seed(0)
chance = random.Random(0)


def sentence() -> Sentence:
    made = Sentence([f"w{chance.randrange(240)}" for _ in range(chance.randrange(24, 40))])
    for token in made:
        token.add_label("kind", chance.choice(["odd", "even"]))
    return made


corpus = Corpus(
    FlairDatapointDataset([sentence() for _ in range(64)]), FlairDatapointDataset([sentence() for _ in range(2)]),
    FlairDatapointDataset([sentence() for _ in range(2)]),
)  # fmt: skip
tagger = SequenceTagger(
    TransformerWordEmbeddings("model", fine_tune=True, layers="-1"), corpus.make_label_dictionary("kind"), "kind",
    hidden_size=32, use_rnn=False, reproject_embeddings=False,
)  # fmt: skip
with timed():
    ModelTrainer(tagger, corpus).fine_tune(
        args.output, learning_rate=1e-3, mini_batch_size=8, max_epochs=args.steps // 8, plugins=[Losses()],
        save_final_model=False, use_final_model_for_eval=True,
    )  # fmt: skip
keep(tagger)
