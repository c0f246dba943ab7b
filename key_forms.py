"""Forms of services' keys, by which redaction of people's text and masking of what is shown know them."""

import re


def any_of(*words: str, before: str = "") -> str:
    """Pattern of alternatives that each begin with a character of their own, led by the class of these.

    `before`: lookbehind that must hold in front of them.
    """
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[0], []).append(word[1:])
    inside = (f"(?<={re.escape(first)})(?:{'|'.join(rests)})" for first, rests in by_first.items())
    behind = before and f"(?<={before}.)"
    return f"[{''.join(map(re.escape, by_first))}]{behind}(?:{'|'.join(inside)})"


KEY = any_of(
    *(rf"{first}k[-_](?=[\w-]*\d)[\w-]{{16,}}" for first in "spr"),  # model and payment services
    *(r"gh[pousr]_\w{20,}", r"github_pat_\w{20,}", r"glpat-[\w-]{16,}"),
    *(r"hf_[a-zA-Z0-9]{16,}", r"npm_[a-zA-Z0-9]{20,}"),  # identifiers of code go on behind a `_`
    *(r"pypi-[\w-]{16,}", r"xox[abeoprs]-[\w-]{10,}", r"A(?:KIA|SIA)[0-9A-Z]{16}", r"AIza[\w-]{30,}"),
    *(r"ya29\.[\w-]{20,}", r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),  # the last: signed web tokens
    *(r"xai-\w{40,}", r"pplx-\w{32,}", r"nvapi-[\w-]{40,}", r"tvly-(?:\w{2,8}-)?\w{24,}", r"csk-\w{40,}"),
    *(r"fw_(?=[a-zA-Z]*\d)[a-zA-Z0-9]{20,}", r"lsv2_(?:pt|sk)_\w{32,}", r"bedrock-api-key-[\w-]{40,}"),
    *(r"e2b_[0-9a-f]{40}", r"fc-[0-9a-f]{32}", r"dapi[0-9a-f]{32}(?:-\d)?"),  # to here: models and agents
    *(r"do[opr]_v1_[0-9a-f]{64}", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}", r"whsec_\w{24,}", r"hvs\.[\w-]{24,}"),
    *(r"dckr_[op]at_[\w-]{24,}", r"GOCSPX-[\w-]{20,}", r"sbp_[0-9a-f]{40}", r"sntry[su]_\w{40,}"),
    *(r"gl(?:rt|ptt|dt|cbt|agent|soat|ffct|imt|ft|oas)-[\w-]{20,}", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}"),
    *(r"AGE-SECRET-KEY-1\w{50,}", r"NRAK-[A-Z0-9]{27}", r"xapp-\d-[\w-]{30,}", r"sq0[a-z]{3}-[\w-]{22,}"),
    *(r"key-[0-9a-f]{32}", r"pul-[0-9a-f]{40}", r"rubygems_[0-9a-f]{48}", r"LTAI[a-zA-Z0-9]{20}"),
    *(r"shippo_(?:live|test)_[0-9a-f]{40}", r"dp\.(?:pt|st|ct|sa|scim|audit)\.\w{40,}"),
    *(r"gsk_\w{40,}", r"r8_\w{30,}", r"pcsk_\w{40,}", r"wandb_v1_\w{30,}", r"ABSK\w{60,}", r"AQ\.[\w-]{40,}"),
    *(r"sb_secret_\w{24,}", r"lin_api_\w{32,}", r"figd_[\w-]{32,}", r"ntn_\w{40,}", r"phx_[a-zA-Z0-9]{32,}"),
    *(r"glsa_\w{32,}", r"squ_[0-9a-f]{40}"),
    *(r"tskey-[a-z]{2,12}-[\w-]{20,}", r"sgp_\w{40,}", r"bkua_[0-9a-f]{40}", r"dt0c01\.[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    *(
        r"AVNS_[\w-]{16,}",
        r"ATATT3[\w-]{60,}",
        r"hvb\.[\w-]{24,}",
        r"pat-[a-z]{2}\d-[0-9a-f-]{36}",
    ),
    before=r"(?<![\w-])",
)
"""Pattern, for ASCII, of a key that begins with a mark of its service."""
KEY_STARTS = (
    *("sk-", "sk_", "pk-", "pk_", "rk-", "rk_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("hf_", "npm_", "pypi-", "xox", "akia", "asia", "aiza", "ya29.", "eyj"),
    *("xai-", "pplx-", "nvapi-", "tvly-", "fw_", "lsv2_", "bedrock-", "e2b_", "fc-", "dapi", "_v1_", "shp", "whsec_"),
    *("hvs.", "dckr_", "gocspx-", "sbp_", "sntry", "glrt-", "glptt-", "gldt-", "glcbt-", "glagent-", "glsoat-"),
    *("glffct-", "glimt-", "glft-", "gloas-", "pmak-", "age-secret", "nrak-", "xapp-", "sq0", "key-", "pul-"),
    *("rubygems_", "ltai", "dp.", "shippo_"),
    *("gsk_", "r8_", "pcsk_", "wandb_v1_", "absk", "aq.", "sb_secret_", "lin_api_", "figd_", "ntn_", "phx_", "glsa_"),
    *("tskey-", "sgp_", "bkua_", "dt0c01.", "squ_", "avns_", "atatt3", "hvb.", "pat-"),
)
"""What a key of these forms holds in small letters: every one of them has one of these."""
