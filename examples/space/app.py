"""The Space: three tabs over `actions`, which do the work and never raise."""

import os
from pathlib import Path

import actions
import gradio as gr

MODEL = os.environ.get("MODEL", "HuggingFaceTB/SmolLM2-135M-Instruct")
REPORT = Path(__file__).parent / "report.html"


def build() -> gr.Blocks:
    """The app, not yet started."""
    with gr.Blocks(title="hf_kvcache") as app:
        gr.Markdown("# hf_kvcache\nKey/value caches for transformers: paged, compressed, attended to in their compressed form.")
        with gr.Tab("Generate"):
            prompt = gr.Textbox(actions.PROMPT, label="Prompt", lines=3, max_length=actions.MOST_CHARACTERS)
            caches = gr.CheckboxGroup(actions.choices(), value=list(actions.DEFAULT), label="Caches, beside the exact one")
            tokens = gr.Slider(8, actions.MOST_TOKENS, value=48, step=1, label="Tokens")
            start = gr.Button("Generate", variant="primary")
            table = gr.Dataframe(headers=list(actions.HEADER), label="Cost", interactive=False)
            texts = gr.Markdown()
            start.click(lambda *given: actions.generate(MODEL, *given), [prompt, caches, tokens], [table, texts])
        with gr.Tab("Plan"):
            with gr.Row():
                numbers = [
                    gr.Number(value, label=label, precision=0)
                    for label, value in (("Layers", 32), ("KV heads", 8), ("Head dim", 128), ("Weights, billions", 8))
                ]
            with gr.Row():
                batch, context = gr.Number(8, label="Batch", precision=0), gr.Number(8192, label="Context", precision=0)
                chip = gr.Dropdown(actions.chips(), value="h100", label="Chip")
                stored = gr.Dropdown(actions.weight_kinds(), value="16bit", label="Weights stored in")
            plan = gr.Button("Plan", variant="primary")
            answer = gr.Code(label="hf-kvcache plan", language=None)
            plan.click(actions.plan, [*numbers, batch, context, chip, stored], answer)
        with gr.Tab("Measured"):
            gr.HTML(actions.measured(REPORT))
    return app


if __name__ == "__main__":
    build().queue(max_size=8).launch()
