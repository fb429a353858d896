"""Reports NaN, which every comparison with a tolerance lets pass.

Report: gpu-mode/pygpubench#7
Speed: fails; reported nan as 'val_loss'
"""

from honest import main

main(share=float("nan"))
