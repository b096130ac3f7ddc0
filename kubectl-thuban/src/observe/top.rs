//! `top`: who sends most, or why most packets are dropped, as thuban-observe counts it in its last window.

use std::io::IsTerminal;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use super::Target;
use super::client::{Relay, read};
use super::error::ObserveError;
use crate::arguments::{Format, TopOptions};
use crate::error::CliError;
use crate::render;

/// What moves a terminal's cursor to the first line, and clears what is below (ECMA-48: CUP, ED).
const CLEAR: &str = "\x1b[H\x1b[J";

/// What thuban-observe has counted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Top {
    pub window_seconds: u64,
    pub rows: Vec<Row>,
}

/// What one pod, network or VPC has sent and got, or what was dropped for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub name: String,
    pub vpc: Option<String>,
    pub packets: u64,
    pub bytes: u64,
    pub dropped: u64,
}

/// Prints the table once, or again and again.
pub async fn print(relay: &Relay, options: &TopOptions, format: Format) -> Result<(), CliError> {
    let target = Target::new("/v1/top", &relay.asked).with("by", Some(options.by.word()));
    let is_table = matches!(format, Format::Table | Format::Wide);
    let clears = options.watch.is_some() && is_table && std::io::stdout().is_terminal();
    loop {
        let top = get(relay, &target).await?;
        if clears {
            render::write(CLEAR)?;
        }
        render::print(format, &top, |_| render::top(&top, options.by))?;
        match options.watch {
            Some(seconds) => sleep(Duration::from_secs(seconds)).await,
            None => return Ok(()),
        }
    }
}

async fn get(relay: &Relay, target: &Target) -> Result<Top, ObserveError> {
    let body = relay.ask(target).await?;
    Ok(serde_json::from_slice(&read(body).await?)?)
}

#[cfg(test)]
mod tests {
    use super::{Target, get};
    use crate::arguments::TopBy;
    use crate::observe::ObserveError;
    use crate::observe::testing::Played;
    use crate::render;

    const ANSWER: &str = "{\"window_seconds\": 60, \"rows\": [
        {\"name\": \"red/web-0\", \"vpc\": \"red\", \"packets\": 12, \"bytes\": 4200, \"dropped\": 3},
        {\"name\": \"svc\", \"vpc\": null, \"packets\": 1, \"bytes\": 60, \"dropped\": 0}]}";

    fn target(played: &Played) -> Target {
        Target::new("/v1/top", &played.relay.asked).with("by", Some(TopBy::Pods.word()))
    }

    #[tokio::test]
    async fn the_table_has_a_row_for_each_name() {
        let played = Played::start(200, &[ANSWER]).await;
        let top = get(&played.relay, &target(&played)).await.unwrap();
        let text = render::top(&top, TopBy::Pods);
        let rows: Vec<&str> = text.lines().map(str::trim_end).collect();
        assert_eq!(
            rows,
            [
                "the last 60 s",
                "POD        VPC  PACKETS  BYTES  DROPPED",
                "red/web-0  red  12       4200   3",
                "svc        -    1        60     0",
            ]
        );
        assert!(
            played.asked()[0].starts_with("GET /v1/top?namespace=red&by=pod HTTP/1.1\r\n"),
            "{:?}",
            played.asked()
        );
    }

    #[tokio::test]
    async fn an_empty_table_says_so() {
        let played = Played::start(200, &["{\"window_seconds\": 60, \"rows\": []}"]).await;
        let top = get(&played.relay, &target(&played)).await.unwrap();
        assert_eq!(
            render::top(&top, TopBy::Reasons),
            "the last 60 s\nnothing was seen\n"
        );
    }

    #[tokio::test]
    async fn an_answer_that_is_no_table_is_an_error() {
        let played = Played::start(200, &["<html>"]).await;
        let error = get(&played.relay, &target(&played)).await.unwrap_err();
        assert!(matches!(error, ObserveError::Json(_)), "{error}");
        let played = Played::start(400, &["{\"error\": \"by: pod, network, vpc or reason\"}"]).await;
        let error = get(&played.relay, &target(&played)).await.unwrap_err();
        assert!(
            error.to_string().ends_with("by: pod, network, vpc or reason"),
            "{error}"
        );
    }
}
