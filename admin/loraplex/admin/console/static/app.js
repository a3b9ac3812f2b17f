/** The console: sign-in, menu, and the page of the address. */
import { ApiError, offline } from "./lib/api.js";
import { html, render, useEffect, useState } from "./lib/html.js";
import { place, replace, show } from "./lib/place.js";
import { caller, endedBy, isOperator, mayCall, onDataPort, setTheme, signIn, signOut, tenant, theme } from "./lib/store.js";
import { TenantPicker } from "./lib/tenant_picker.js";
import { ErrorBox, Field, Loading, Page } from "./lib/ui.js";
import { forTenant, menuPart, ofTenant, pageAt, pages } from "./pages/index.js";

const NOT_LOADED = "The page could not be loaded. If the server was upgraded meanwhile, reload the console and sign in.";

/** The menu of the caller. */
const menu = () => pages.filter((page) => page.nav && (!page.who || (page.who === "operator") === isOperator.value));

function SignIn() {
  const [secret, setSecret] = useState("");
  const [error, setError] = useState(/** @type {any} */ (null));
  const [busy, setBusy] = useState(false);

  /** @param {Event} event */
  async function onSubmit(event) {
    event.preventDefault();
    setBusy(true);
    try {
      await signIn(secret);
    } catch (refused) {
      setError(refused);
      setBusy(false);
    }
  }

  const where = onDataPort
    ? html`An operator made it for you; it begins with <code>lpx_</code>. The quickstart's is in <code>data/quickstart-key</code>.
        The admin token works on the admin port only.`
    : html`The admin token is in the file <code>admin-token</code> of the server's data directory, unless
        <code>--admin-token</code> gave another. A key begins with <code>lpx_</code>.`;
  return html`<main class="sign-in">
    <h1>Loraplex</h1>
    ${endedBy.value && html`<p class="error" role="alert">${endedBy.value}</p>`}
    <form onSubmit=${onSubmit}>
      <${Field} label=${onDataPort ? "API key" : "Admin token or API key"}
        hint=${html`${where} It stays in this tab's memory: a reload asks for it again.`}>
        <input data-testid="secret" type="password" autocomplete="off" spellcheck=${false} required value=${secret}
          onInput=${(/** @type {any} */ event) => setSecret(event.target.value)} />
      <//>
      <button type="submit" class="primary" data-testid="sign-in" disabled=${busy}>Sign in</button>
    </form>
    ${error && html`<${ErrorBox} error=${error} />`}
  </main>`;
}

function Menu() {
  const found = pageAt(place.value)?.page;
  const part = found ? menuPart(found) : place.value.split("/")[0];
  return html`<nav class="menu" aria-label="Pages">
    ${menu().map(
      (page) => html`<a href=${`#/${addressOf(page)}`} data-testid=${page.testid}
        aria-current=${menuPart(page) === part ? "page" : undefined}>${page.nav}</a>`,
    )}
  </nav>`;
}

function Account() {
  const who = isOperator.value ? "Operator" : `${caller.value?.tenant} · ${caller.value?.key?.name ?? caller.value?.key?.id}`;
  return html`<div class="account">
    <span data-testid="who">${who}</span>
    <label><span class="hidden">Colours</span>
      <select data-testid="theme" value=${theme.value} onChange=${(/** @type {any} */ event) => setTheme(event.target.value)}>
        <option value="auto">System</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </label>
    <button type="button" data-testid="sign-out" onClick=${() => signOut()}>Sign out</button>
  </div>`;
}

/** The place of a page of the menu. @param {import("./pages/index.js").PageEntry} page */
function addressOf(page) {
  if (!page.at.includes(":")) return page.at;
  return (tenant.value && ofTenant(menuPart(page), tenant.value)) || menuPart(page);
}

function CurrentPage() {
  const found = pageAt(place.value);
  const [loaded, setLoaded] = useState(/** @type {any} */ (null));
  const [tries, setTries] = useState(0);
  const at = found?.page.at;
  useEffect(() => {
    let current = true;
    found?.page.load().then(
      (module) => current && setLoaded({ at, show: module.default }),
      () => current && setLoaded({ at, error: new ApiError(0, "not_loaded", NOT_LOADED) }),
    );
    return () => {
      current = false;
    };
  }, [at, tries]);
  if (loaded?.at !== at) return html`<${Loading} />`;
  if (loaded.error) return html`<${ErrorBox} error=${loaded.error} retry=${() => (setLoaded(null), setTries(tries + 1))} />`;
  return html`<${loaded.show} key=${found?.page.keeps ? at : place.value} ...${found?.params} />`;
}

function App() {
  const signedIn = caller.value !== null;
  const inMenu = menu();
  const first = inMenu.find((page) => !page.scope || mayCall(page.scope)) ?? inMenu[0];
  const at = place.value;
  const found = pageAt(at);
  const named = found?.params.tenant ?? "";
  // An address without a tenant: of the menu, or of an older console.
  const full = tenant.value ? ofTenant(at, tenant.value) : null;
  const isKnown = found !== null || ofTenant(at, "any") !== null;
  useEffect(() => {
    if (!signedIn) document.title = "Loraplex";
    else if (full) replace(at, full);
    else if (!isKnown && first) replace(at, addressOf(first));
    else if (named && isOperator.value) tenant.value = named;
  }, [signedIn, at, full]);
  if (!signedIn) return html`<${SignIn} />`;
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <header class="top">
      <strong class="brand">Loraplex</strong>
      <${Menu} />
      <${Account} />
    </header>
    ${offline.value && html`<p class="offline" role="status" data-testid="offline">
      The server does not answer. It is tried again.</p>`}
    <main id="main" tabindex="-1">
      ${isKnown && (named || !found) && html`<${TenantPicker} tenant=${named} at=${at} onPick=${(/** @type {string} */ id) => show(forTenant(at, id))}
        onFirst=${(/** @type {string} */ id) => replace(at, forTenant(at, id))} />`}
      ${!full && found && content(found)}
    </main>`;
}

/** @param {{ page: import("./pages/index.js").PageEntry, params: Record<string, string> }} found */
function content({ page, params }) {
  if (page.who === "operator" && !isOperator.value) {
    return html`<p class="error" role="alert" data-testid="error">This page needs the admin token, on the admin port.</p>`;
  }
  if (params.tenant && !isOperator.value && params.tenant !== caller.value?.tenant) return html`<${OfAnother} tenant=${params.tenant} />`;
  return html`<${CurrentPage} />`;
}

/** An address of one tenant, and a key of another. @param {{ tenant: string }} props */
function OfAnother({ tenant: other }) {
  const own = caller.value?.tenant ?? "";
  return html`<${Page} title=${`A page of ${other}`}>
    <p class="error" role="alert" data-testid="error">This address is of the tenant ${other}, and this key of ${own}. Sign in with a key
      of ${other} to see it.</p>
    <p class="actions">
      <button type="button" onClick=${() => signOut()}>Sign in again</button>
      <a class="button" data-testid="own-page" href=${`#/${forTenant(place.value, own)}`}>The same page of ${own}</a>
    </p>
  <//>`;
}

/** The hash names a page, so the browser's own jump cannot be used. @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

setTheme("auto");
const root = document.getElementById("app");
if (root) {
  root.replaceChildren();
  render(html`<${App} />`, root);
}
