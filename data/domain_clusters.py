"""Domains by text clustering: tf-idf vectors of user turns and k-means (scikit-learn), for unnamed conversations.

Fitted on an even sample of the log, in one thread, with a fixed seed: the same log gives the same domains. Another log
gives others, unless the mix has an ancestor with as many clusters: then its centres are kept, and with them what each
name means. How far the clusters are the data's own and not chance is measured by the agreement (adjusted Rand index;
1: the same, 0: chance) of two fits, each on one half of the sample.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from .. import fingerprint
from ..errors import CorruptDataError, InputError

FILE = "clusters.parquet"
MOST_FITTED = 20_000
_MOST_TERMS, _SHOWN_TERMS, _BATCH = 4096, 8, 4096
_SEED, _STARTS = 0, 4
_TFIDF: dict[str, Any] = {"sublinear_tf": True, "dtype": np.float32, "token_pattern": r"[^\W\d_]{2,}"}
Floats = NDArray[np.float32]


class Clusters(NamedTuple):
    """Fitted text clusters: C centres over T tf-idf terms."""

    terms: list[str]
    idf_T: Floats
    centres_CT: Floats
    agreement: float | None
    """Adjusted Rand index of two halves' fits; None: the centres are an ancestor's."""

    @property
    def names(self) -> list[str]:
        """Domain names of the clusters: c00, c01, …"""
        return [f"c{number:02d}" for number in range(len(self.centres_CT))]

    def record(self) -> dict[str, Any]:
        """The manifest's record of the clusters: their best terms, a digest of the centres, the agreement."""
        best = np.argsort(-self.centres_CT, axis=1, kind="stable")[:, :_SHOWN_TERMS]
        return {
            "terms": {name: [self.terms[t] for t in row] for name, row in zip(self.names, best.tolist())},
            "centres": fingerprint.of_bytes(self.centres_CT.tobytes()),
            "agreement_of_halves": self.agreement,
            "kept_from_ancestor": self.agreement is None,
        }


def fit(texts: Sequence[str], count: int) -> Clusters:
    """Fit `count` clusters to texts. Raises InputError where the texts are too few or too alike."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.metrics import adjusted_rand_score

    if len(texts) < 2 * count:
        raise InputError(
            f"mix.domains.clusters {count}: {len(texts)} conversations to name; must be at least {2 * count}"
        )

    # The vocabulary: frequent terms, without those of one text alone or of more than half of them.
    words = TfidfVectorizer(max_features=_MOST_TERMS, min_df=2, max_df=0.5, **_TFIDF)
    try:
        vectors = words.fit_transform(texts)
    except ValueError as error:
        raise InputError(f"mix.domains.clusters {count}: the texts hold too few words in common ({error})") from None

    # Two fits, each on a half, tell how stable the clusters are; the fit on all gives them, the largest first.
    halves = [_centres(vectors[half::2], count) for half in range(2)]
    agreement = float(adjusted_rand_score(*(_nearest(vectors, centres) for centres in halves)))
    centres = _centres(vectors, count)
    sizes = np.bincount(_nearest(vectors, centres), minlength=count)
    by_size = sorted(range(count), key=lambda c: (-sizes[c], centres[c].tobytes()))
    return Clusters(words.get_feature_names_out().tolist(), words.idf_.astype(np.float32), centres[by_size], agreement)


def assign(clusters: Clusters, texts: Iterable[str]) -> Iterator[str]:
    """Yield the cluster's name of each text, batch by batch."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    # A vectorizer of the stored terms and weights; `transform` needs no fit then.
    words = TfidfVectorizer(vocabulary=clusters.terms, **_TFIDF)
    words.idf_ = clusters.idf_T
    names = clusters.names
    texts = iter(texts)
    while batch := list(islice(texts, _BATCH)):
        yield from (names[c] for c in _nearest(words.transform(batch), clusters.centres_CT))


def write(clusters: Clusters, folder: Path) -> None:
    """Write the clusters into a mix folder."""
    columns = dict(zip(clusters.names, clusters.centres_CT))
    table = pa.table({"term": clusters.terms, "idf": clusters.idf_T, **columns})
    pq.write_table(table, folder / FILE, compression="zstd")


def read_first(tables: Iterable[pa.Table], count: int) -> Clusters | None:
    """Read the clusters of the first table of an earlier mix that has `count` of them; None: none has.

    Raises CorruptDataError for a table that holds none."""
    for table in tables:
        # Columns: term, idf, and one for each centre.
        term, *numbers = table.column_names or [""]
        terms = table.column(0).to_pylist() if term == "term" else []
        numeric = all(table.schema.field(name).type == pa.float32() for name in numbers)
        if not terms or not numeric or len(set(terms)) < len(terms) or any(one.null_count for one in table.columns):
            raise CorruptDataError(f"{FILE} of an ancestor: must hold terms, each once, and numbers of them")
        if len(numbers) == count + 1:
            idf, *centres = (table.column(name).to_numpy() for name in numbers)
            return Clusters(terms, idf, np.stack(centres), None)
    return None


def _centres(vectors: Any, count: int) -> Floats:
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # threads add up in any order
        centres: Floats = KMeans(count, n_init=_STARTS, random_state=_SEED).fit(vectors).cluster_centers_
    return centres


def _nearest(vectors: Any, centres_CT: Floats) -> NDArray[np.int64]:
    """Index of the nearest centre (Euclidean) of each row; of equals, the first."""
    # Squared distances without the rows' own norms, which do not change the order.
    distance_NC = (centres_CT**2).sum(axis=1) - 2 * (vectors @ centres_CT.T)
    found: NDArray[np.int64] = distance_NC.argmin(axis=1)
    return found
