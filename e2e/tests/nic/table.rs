//! The tables at the end. Times are information: no test depends on them.

use crate::{host::Row, request::Choice};

pub fn print(choices: &[(&str, u32, Choice)], rows: &[Row]) {
    println!("\n| card | driver | MTU | native XDP | auto |");
    println!("|---|---|---|---|---|");
    for (card, mtu, choice) in choices {
        let refusal = choice.refusal.as_deref();
        let native = refusal.map_or("taken".to_owned(), |said| format!("refused: {said}"));
        println!(
            "| {card} | {} | {mtu} | {native} | {} |",
            choice.driver, choice.hook
        );
    }
    println!(
        "\n| card | MTU | transit | passed | failed | frames at native XDP | XDP_TX | XDP_DROP | ping, ms | bounce, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for row in rows {
        let Row {
            card,
            mtu,
            hooks,
            outcome,
        } = row;
        let driver = outcome.driver;
        println!(
            "| {card} | {mtu} | {} | {} | {} | {} | {} | {} | {:.2} | {:.2} |",
            hooks.name(),
            outcome.passed,
            outcome.failures.len(),
            driver.seen,
            driver.turned,
            driver.dropped,
            1000.0 * outcome.delivered.as_secs_f64(),
            1000.0 * outcome.bounced.as_secs_f64()
        );
    }
}
