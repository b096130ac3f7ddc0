//! thuban-connectivity: runs in the pods of `kubectl thuban connectivity test`, without any right.

use std::io::{self, Write};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use clap::Parser;
use thuban_connectivity::ask::ask_all;
use thuban_connectivity::serve::Server;
use thuban_connectivity::{Answer, QUESTIONS, Question};

/// Tests a pod's network: answers with a name, or asks other pods for theirs.
#[derive(Debug, Parser)]
#[command(name = "thuban-connectivity", version)]
enum Arguments {
    /// Answers with a name at TCP and UDP ports.
    Serve {
        /// The name.
        #[arg(long)]
        name: String,
        /// An address and port to listen at; may be given more than once.
        #[arg(long = "listen", value_name = "ADDRESS:PORT", required = true)]
        addresses: Vec<SocketAddr>,
    },
    /// Asks questions and prints an answer a line, as JSON.
    Ask {
        /// The questions, a list in JSON.
        #[arg(long, env = QUESTIONS)]
        questions: String,
    },
}

fn main() -> Result<()> {
    match Arguments::parse() {
        Arguments::Serve { name, addresses } => {
            Server::bind(&name, &addresses).context("listening")?.run();
        }
        Arguments::Ask { questions } => {
            let questions: Vec<Question> =
                serde_json::from_str(&questions).context("reading the questions")?;
            ask_all(&questions, print);
        }
    }
    Ok(())
}

fn print(answer: &Answer) {
    if let Ok(line) = serde_json::to_string(answer) {
        // Who reads the log may be gone.
        let _ = writeln!(io::stdout().lock(), "{line}");
    }
}
