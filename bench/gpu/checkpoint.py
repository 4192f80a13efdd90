"""Write a model of a known shape with random weights as a Hugging Face checkpoint.

python -m bench.gpu.checkpoint --shape qwen3-0.6b --out DIR
"""

from pathlib import Path

import click

from bench.gpu.shapes import CONFIGS, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@click.command()
@click.option("--shape", type=click.Choice(list(CONFIGS)), required=True)
@click.option("--out", type=click.Path(exists=False, path_type=Path), required=True)
def main(shape: str, out: Path) -> None:
    save_checkpoint(shape, out, ROOT / "demo_model")
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir()) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
