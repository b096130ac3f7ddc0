//! A headless Chromium with one page, and the server of the page's sources, which plays graphs to it.
//!
//! What the page must not do is recorded from its start: messages on its console, exceptions, and requests to anybody
//! but its server.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use chromiumoxide::{
    Browser, BrowserConfig, Page,
    cdp::{
        IntoEventKind,
        browser_protocol::{
            emulation::MediaFeature,
            log::{EventEntryAdded, LogEntryLevel},
            network::EventRequestWillBeSent,
        },
        js_protocol::runtime::{EventConsoleApiCalled, EventExceptionThrown},
    },
    handler::viewport::Viewport,
};
use futures::StreamExt;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

/// Between two looks at the page.
const PAUSE: Duration = Duration::from_millis(100);

type Findings = Arc<Mutex<Vec<String>>>;

/// A page of a browser of its own. Both, and the page's server, end with it.
pub struct Session {
    page: Page,
    browser: Browser,
    profile: PathBuf,
    findings: Findings,
    _server: Child,
}

impl Session {
    /// Opens the page for a namespace, whose name chooses what the server plays. The scheme is light or dark.
    pub async fn open(namespace: &str, scheme: &str) -> Result<Self> {
        let (server, origin) = serve().await?;
        let profile = new_profile();
        let viewport = Viewport {
            width: 1440,
            height: 900,
            ..Viewport::default()
        };
        let config = BrowserConfig::builder()
            .chrome_executable("/usr/bin/chromium")
            // The tests may run as root, for whom Chromium has no sandbox. The page is our own.
            .no_sandbox()
            .user_data_dir(&profile)
            .viewport(viewport)
            .build()
            .map_err(|error| anyhow!(error))?;
        let (browser, mut handler) = Browser::launch(config).await.context("starting chromium")?;
        tokio::spawn(async move { while handler.next().await.is_some() {} });
        let page = browser.new_page("about:blank").await?;
        let findings = record(&page, &origin).await?;
        page.emulate_media_features(vec![MediaFeature::new("prefers-color-scheme", scheme)])
            .await?;
        page.goto(format!("{origin}?namespace={namespace}")).await?;
        Ok(Self {
            page,
            browser,
            profile,
            findings,
            _server: server,
        })
    }

    /// Returns what a function of JavaScript says of the page.
    pub async fn ask(&self, function: &str) -> Result<bool> {
        Ok(self.page.evaluate(function).await?.into_value()?)
    }

    /// Waits until a function of JavaScript says true.
    pub async fn wait(&self, what: &str, timeout: Duration, function: &str) -> Result<()> {
        let end = Instant::now() + timeout;
        while !self.ask(function).await? {
            ensure!(
                Instant::now() < end,
                "waited {} s for {what}; findings: {:?}",
                timeout.as_secs(),
                self.findings()
            );
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Gives the focus to the first element of a selector, and presses keys.
    pub async fn press(&self, selector: &str, keys: &[&str]) -> Result<()> {
        let element = self.page.find_element(selector).await?;
        element.focus().await?;
        for key in keys {
            element.press_key(key).await?;
        }
        Ok(())
    }

    /// Ends the browser, and fails if the page did what it must not do.
    pub async fn close_without_findings(self) -> Result<()> {
        let findings = self.close().await?;
        ensure!(findings.is_empty(), "{}", findings.join("\n"));
        Ok(())
    }

    /// Ends the browser, and returns what the page did that it must not do.
    pub async fn close(mut self) -> Result<Vec<String>> {
        self.browser.close().await?;
        self.browser.wait().await?;
        Ok(self.findings())
    }

    fn findings(&self) -> Vec<String> {
        self.findings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.profile);
    }
}

/// Returns a folder of its own for a browser.
fn new_profile() -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    env::temp_dir().join(format!("thuban-page-{}-{count}", process::id()))
}

/// Starts the server of the page's sources on a free port. Returns it with the address of its root.
async fn serve() -> Result<(Child, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../observe/ui");
    ensure!(
        folder.join("dist/index.html").exists(),
        "the page is not built: run `npm ci && npm run build` in observe/ui"
    );
    let mut server = Command::new("node")
        .args(["dev-server.mjs", "0"])
        .current_dir(folder)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("starting node")?;
    let output = server.stdout.take().context("the output of node")?;
    let line = BufReader::new(output).lines().next_line().await?;
    let line = line.context("the page's server has ended")?;
    let root = line.split('?').next().unwrap_or_default();
    Ok((server, root.to_owned()))
}

/// Records what the page does that it must not do.
async fn record(page: &Page, origin: &str) -> Result<Findings> {
    let findings = Findings::default();
    let origin = origin.to_owned();
    listen(page, &findings, |event: &EventEntryAdded| {
        matches!(event.entry.level, LogEntryLevel::Error).then(|| format!("error: {:?}", event.entry))
    })
    .await?;
    listen(page, &findings, |event: &EventConsoleApiCalled| {
        Some(format!("console: {event:?}"))
    })
    .await?;
    listen(page, &findings, |event: &EventExceptionThrown| {
        Some(format!("exception: {event:?}"))
    })
    .await?;
    listen(page, &findings, move |event: &EventRequestWillBeSent| {
        let url = &event.request.url;
        let is_own = url.starts_with(&origin) || url.starts_with("data:");
        (!is_own).then(|| format!("foreign request: {url}"))
    })
    .await?;
    Ok(findings)
}

/// Records what `read` finds in events of one kind.
async fn listen<T>(
    page: &Page,
    findings: &Findings,
    read: impl Fn(&T) -> Option<String> + Send + 'static,
) -> Result<()>
where
    T: IntoEventKind + Send + Sync + Unpin + 'static,
{
    let mut events = page.event_listener::<T>().await?;
    let findings = Arc::clone(findings);
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if let Some(finding) = read(&event) {
                findings
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(finding);
            }
        }
    });
    Ok(())
}
