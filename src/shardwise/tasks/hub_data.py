"""The keys of a `data` block that can read a Hugging Face data set."""

from __future__ import annotations

from pydantic import Field, model_validator

from shardwise.config.schema import DataBlock, PathText, hub_name


class HubData(DataBlock):
    source: str = Field(description="Where the samples come from; a block narrows it, and one of its values is hub.")
    dataset: PathText | None = Field(
        None,
        description="hub: name of the data set, or a folder that `datasets` can read or has saved.",
        json_schema_extra=hub_name("dataset"),
    )
    split: str = Field("train", description="hub: which split to train on.")
    valid_split: str | None = Field(None, description="hub: which split to validate on; default: a share of `split`.")

    @model_validator(mode="after")
    def _names_a_data_set(self) -> HubData:
        if self.source == "hub" and self.dataset is None:
            raise ValueError("source: hub needs dataset, the name of a Hugging Face data set or a folder")
        given = [key for key in ("dataset", "valid_split") if getattr(self, key) is not None]
        if self.source != "hub" and given:
            verb = "is" if len(given) == 1 else "are"
            raise ValueError(f"{' and '.join(given)} {verb} read with source: hub, but source is {self.source}")
        return self
