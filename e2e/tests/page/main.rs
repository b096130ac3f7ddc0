//! The page of flows in a headless Chromium, against the server of its sources, which plays graphs to it.
//!
//! Needs Chromium, node, and `observe/ui/dist`: `cargo xtask test --only page` makes all of them. No root, no cluster.

mod session;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use self::session::Session;

/// Until a page shows what it has been told from the start.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Until a page shows a drop.
const DROP_TIMEOUT: Duration = Duration::from_secs(5);

const IS_LIVE: &str = "() => document.getElementById('state').textContent === 'Live'";
const HAS_DROPPED_ROW: &str =
    "() => document.querySelector('tr.dropped')?.textContent.includes('outside_vpc') ?? false";
/// Whether the graph has pixels of the colour of drops.
const IS_RED: &str = r##"() => {
    const colour = getComputedStyle(document.documentElement).getPropertyValue("--drop").trim();
    const wanted = [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
    let count = 0;
    for (const canvas of document.querySelectorAll("#graph canvas")) {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        for (let place = 0; place < data.length; place += 4) {
            const isNear = wanted.every((part, offset) => Math.abs(part - data[place + offset]) < 8);
            if (isNear && data[place + 3] > 200) count += 1;
        }
    }
    return count > 100;
}"##;

async fn shows_a_planted_drop(scheme: &str) -> Result<()> {
    let session = Session::open("planted", scheme).await?;
    session.wait("a graph", START_TIMEOUT, IS_LIVE).await?;
    ensure!(!session.ask(IS_RED).await?, "the graph is red before the drop");
    let planted = Instant::now();
    let plant = "() => fetch('/plant', { method: 'POST' }).then((answer) => answer.ok)";
    ensure!(session.ask(plant).await?, "no drop was planted");
    session
        .wait("a row of the drop", DROP_TIMEOUT, HAS_DROPPED_ROW)
        .await?;
    session.wait("red in the graph", DROP_TIMEOUT, IS_RED).await?;
    let took = planted.elapsed();
    ensure!(took <= DROP_TIMEOUT, "the drop was red after {took:?}");
    session.close_without_findings().await
}

#[tokio::test]
async fn a_planted_drop_is_red_within_five_seconds() -> Result<()> {
    shows_a_planted_drop("light").await
}

#[tokio::test]
async fn a_planted_drop_is_red_on_a_dark_page_too() -> Result<()> {
    shows_a_planted_drop("dark").await
}

#[tokio::test]
async fn three_hundred_networks_are_told_to_be_truncated() -> Result<()> {
    let session = Session::open("many", "light").await?;
    let is_told = "() => document.getElementById('notices').textContent.startsWith('Truncated.')";
    session.wait("a notice", START_TIMEOUT, is_told).await?;
    session.wait("drops in the graph", DROP_TIMEOUT, IS_RED).await?;
    session.close_without_findings().await
}

#[tokio::test]
async fn a_page_without_flows_says_why() -> Result<()> {
    let session = Session::open("off", "light").await?;
    let is_told = "() => document.getElementById('notices').textContent.includes('THUBAN_FLOWS')";
    session.wait("the reason", START_TIMEOUT, is_told).await?;
    session.close_without_findings().await
}

/// The browser itself logs lost streams as errors, so findings do not count here.
#[tokio::test]
async fn a_lost_stream_is_told_and_tried_again() -> Result<()> {
    let session = Session::open("cut-off", "light").await?;
    let is_told = "() => /^Cut off since .*Next try in/.test(document.getElementById('notices').textContent)";
    session
        .wait("the notice of a lost stream", START_TIMEOUT, is_told)
        .await?;
    session.close().await.map(drop)
}

/// The same of a refused stream.
#[tokio::test]
async fn a_refused_reader_reads_why() -> Result<()> {
    let session = Session::open("secret", "light").await?;
    let is_told = "() => document.getElementById('notices').textContent.includes('you may not get flows')";
    session.wait("the refusal", START_TIMEOUT, is_told).await?;
    session.close().await.map(drop)
}

#[tokio::test]
async fn the_keyboard_selects_a_row_of_the_list() -> Result<()> {
    let session = Session::open("three", "light").await?;
    session.wait("a row", START_TIMEOUT, HAS_DROPPED_ROW).await?;
    session
        .press("tbody tr", &["ArrowDown", "ArrowUp", "Enter"])
        .await?;
    let has_remedy = "() => document.getElementById('details').textContent.includes('owner for spec.egress')";
    session
        .wait("the remedy of the drop", DROP_TIMEOUT, has_remedy)
        .await?;
    let is_focused = "() => document.activeElement.matches('tr[aria-selected=\"true\"]')";
    ensure!(session.ask(is_focused).await?, "the focus has left the row");
    session.close_without_findings().await
}
