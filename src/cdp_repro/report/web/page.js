// The contents list follows the reader; what is folded is opened for printing.

const links = new Map([...document.querySelectorAll("nav a:not(.top)")].map(link => [link.hash.slice(1), link]));
const headings = [...links.keys()].map(id => document.getElementById(id));

function follow() {
  const passed = headings.filter(heading => heading.getBoundingClientRect().top < innerHeight / 3);
  const isEnd = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
  const current = isEnd ? headings.at(-1) : passed.at(-1);
  for (const [id, link] of links) link.classList.toggle("here", id === current?.id);
  const here = links.get(current?.id), strip = here?.parentElement;
  if (strip && strip.scrollWidth > strip.clientWidth) strip.scrollLeft = here.offsetLeft - strip.offsetLeft - 16;
}

addEventListener("scroll", follow, { passive: true });
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(each => { each.open = true; }));
follow();
