//! What is printed: reports as text for people, or as JSON or YAML for programs. The documented form of JSON is that of
//! the reports' fields.

mod connectivity;
mod lines;
mod tables;
mod tree;
mod why;

pub use connectivity::{connectivity, finding};
pub use lines::report;
pub use tables::{endpoints, explanations, top, versions};
pub use tree::tree;
pub use why::answer;

use std::io::{self, ErrorKind, IsTerminal, Write};

use serde::Serialize;

use crate::arguments::Format;
use crate::error::CliError;
use crate::report::Level;

/// How texts are written.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    pub is_wide: bool,
    pub has_colour: bool,
}

impl Style {
    /// Returns the style of a format on standard output.
    pub fn of(format: Format) -> Self {
        // https://no-color.org
        let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            is_wide: format == Format::Wide,
            has_colour: io::stdout().is_terminal() && !is_refused,
        }
    }

    /// Returns the word of a level, of one width.
    fn word(self, level: Level) -> String {
        let (word, colour) = match level {
            Level::Ok => ("OK  ", "32"),
            Level::Warn => ("WARN", "33"),
            Level::Unseen => ("----", "2"),
        };
        if self.has_colour {
            format!("\x1b[{colour}m{word}\x1b[0m")
        } else {
            word.to_owned()
        }
    }
}

/// Prints something in the format that is asked for.
pub fn print(
    format: Format,
    value: &impl Serialize,
    text: impl FnOnce(Style) -> String,
) -> Result<(), CliError> {
    let text = match format {
        Format::Table | Format::Wide => text(Style::of(format)),
        Format::Json => serde_json::to_string_pretty(value)? + "\n",
        Format::Yaml => serde_yaml_ng::to_string(value)?,
    };
    write(&text)
}

/// Writes to standard output. A reader who has enough, such as `head`, is no error.
pub fn write(text: &str) -> Result<(), CliError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
