// What scrolls sideways can be reached with a keyboard. The theme wraps tables, and takes the mark off code, after a page is read.
const reachable = () => {
  for (const one of document.querySelectorAll("pre > code:not([tabindex]), .md-typeset__scrollwrap:not([tabindex])")) {
    if (one.scrollWidth > one.clientWidth) one.tabIndex = 0;
  }
};
new MutationObserver(reachable).observe(document.documentElement, { childList: true, subtree: true, attributeFilter: ["tabindex"] });
addEventListener("load", reachable);
addEventListener("resize", reachable);
