"""How `report.html` looks: one style sheet, light and dark, fonts of the reader's system."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf8; --card: #ffffff; --ink: #1c1b19; --soft: #6b675f; --rule: #e6e2da; --lane: #f3f0ea;
  --c1: #2563a8; --c2: #d2691e; --c3: #2f8f6b; --c4: #8b5bb5; --c5: #b8860b; --c6: #b53a5b;
  --h1: #2f8f6b; --h2: #9fcfbb; --h3: #ebe7df; --h4: #f3cfa9; --h5: #e08a45; --h6: #b53a5b;
  --r1: #d6e4f0; --r2: #a9c8e2; --r3: #78a9d0; --r4: #4a88ba; --r5: #28689f; --r6: #174a78;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16171a; --card: #1e2024; --ink: #eceae5; --soft: #9b978e; --rule: #33353b; --lane: #26282d;
    --c1: #6ea8e5; --c2: #f0a05a; --c3: #63c39d; --c4: #bd96e3; --c5: #dcb451; --c6: #ea7f9b;
    --h1: #63c39d; --h2: #2d5f4e; --h3: #303238; --h4: #6b4a2a; --h5: #c9772f; --h6: #ea7f9b;
    --r1: #2d4a66; --r2: #3a6387; --r3: #4c7fab; --r4: #639bc8; --r5: #86b8e0; --r6: #b9d9f0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1200px; margin: 0 auto; padding: 48px 24px 72px; }
header p { margin: 4px 0 0; color: var(--soft); }
h1 { font-size: 34px; line-height: 1.15; letter-spacing: -0.02em; font-weight: 650; margin: 0; }
h2 { font-size: 20px; letter-spacing: -0.01em; font-weight: 600; margin: 48px 0 14px; }
h2 + p { margin: -12px 0 16px; color: var(--soft); font-size: 13px; }
h3 { font-size: 15px; font-weight: 600; margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 1px;
  margin: 32px 0 0; padding: 0; background: var(--rule);
  border: 1px solid var(--rule); border-radius: 12px; overflow: hidden; }
@media (max-width: 860px) { .tiles { grid-template-columns: repeat(2, 1fr); } }
.tiles div { background: var(--card); padding: 16px 18px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0 0; font-size: 25px; line-height: 1.25; font-weight: 600; letter-spacing: -0.015em; }
.tiles dd b { font-weight: inherit; }
.tiles dd small { display: block; font-size: 13px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 20px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 16px 18px 10px; display: flex; flex-direction: column; }
.stack figure + figure { margin-top: 16px; }
figcaption p { margin: 1px 0 0; color: var(--soft); font-size: 13px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 10px 0 6px; padding: 0;
  font-size: 13px; color: var(--soft); }
.legend b { color: var(--ink); font-weight: 600; }
.key { width: 10px; height: 10px; margin-right: 6px; }
.chart { display: block; width: 100%; height: auto; overflow: visible; margin-top: auto; }
.top .chart { margin-top: 6px; }
.scroll { overflow-x: auto; }
.timeline { min-width: 760px; margin-top: 10px; }
.tick { fill: var(--soft); font-size: 11px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.lane { fill: var(--lane); }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.hit { fill: var(--ink); opacity: 0; }
.hit:hover { opacity: 0.07; }
.hair { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; visibility: hidden; }
.hair.shown { visibility: visible; }
.level { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 4 4; }
.mark-recovery { stroke: var(--c6); stroke-width: 1.4; } .mark-resize { stroke: var(--c5); stroke-width: 1.4;
  stroke-dasharray: 6 3; }
.of-recovery { color: var(--c6); border-bottom: 2px solid; } .of-resize { color: var(--c5); border-bottom: 2px dashed; }
.strong { fill: var(--ink); }
.heat1 { fill: var(--h1); } .heat2 { fill: var(--h2); } .heat3 { fill: var(--h3); }
.heat4 { fill: var(--h4); } .heat5 { fill: var(--h5); } .heat6 { fill: var(--h6); }
.tip { position: fixed; z-index: 9; pointer-events: none; max-width: 340px; background: var(--card); color: var(--ink);
  border: 1px solid var(--rule); border-radius: 8px; padding: 7px 10px; font-size: 12.5px; line-height: 1.45;
  box-shadow: 0 4px 18px rgb(0 0 0 / 0.16); }
.tip strong { display: block; font-weight: 600; }
.tip div { display: flex; justify-content: space-between; gap: 16px; } .tip span { color: var(--soft); }
.tip b { font-weight: 600; }
.zoom .bar { display: flex; flex-wrap: wrap; gap: 6px 20px; align-items: center; justify-content: space-between; }
.zoom .steps { display: flex; flex-wrap: wrap; gap: 6px; margin: 10px 0 4px; }
.zoom button { font: inherit; font-size: 13px; color: var(--ink); background: var(--lane); cursor: pointer;
  border: 1px solid var(--rule); border-radius: 7px; padding: 3px 11px; }
.zoom button[aria-pressed="true"] { background: var(--ink); color: var(--card); border-color: var(--ink); }
.zoom canvas { display: block; width: 100%; margin-top: 8px; cursor: grab; touch-action: pan-y; border-radius: 4px; }
.zoom canvas:active { cursor: grabbing; }
.zoom canvas:focus-visible { outline: 2px solid var(--c1); outline-offset: 3px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 6px 10px;
  overflow-x: auto; }
.charts + .card { margin-top: 20px; }
.events td:last-child, .events th:last-child { text-align: left; white-space: normal; min-width: 260px; }
.events td:nth-child(3), .events th:nth-child(3) { text-align: left; } .events tr:last-child td { border-bottom: 0; }
.stroke1 { stroke: var(--c1); } .stroke2 { stroke: var(--c2); } .stroke3 { stroke: var(--c3); }
.stroke4 { stroke: var(--c4); } .stroke5 { stroke: var(--c5); } .stroke6 { stroke: var(--c6); }
.fill1, .kind-forward { fill: var(--c1); } .fill2, .kind-transfer { fill: var(--c2); }
.fill3, .kind-backward { fill: var(--c3); }
.fill4, .kind-attention { fill: var(--c4); } .fill5, .kind-reduce { fill: var(--c5); }
.fill6, .kind-update { fill: var(--c6); }
.kind-wait { fill: var(--rule); } .kind-load { fill: var(--soft); } .kind-encode { fill: var(--r6); }
.ramp1 { fill: var(--r1); } .ramp2 { fill: var(--r2); } .ramp3 { fill: var(--r3); }
.ramp4 { fill: var(--r4); } .ramp5 { fill: var(--r5); } .ramp6 { fill: var(--r6); }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; margin-top: 16px; }
summary { cursor: pointer; padding: 12px 18px; font-weight: 600; font-size: 15px; }
details > div { overflow-x: auto; padding: 0 18px 16px; }
pre { margin: 0; font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; }
@media (max-width: 560px) {
  main { padding: 32px 14px 56px; }
  .tiles dd { font-size: 20px; }
  .charts .chart .tick { font-size: 17px; } .charts .line { stroke-width: 3.2; }
  figure { padding: 14px 14px 10px; }
}
@media print { body { background: none; } figure, details { break-inside: avoid; } }
"""
