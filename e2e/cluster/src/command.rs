//! Runs other programs: their messages on failure become the error.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result, anyhow, bail};

/// Runs a command to its end and returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(command)?).into_owned())
}

/// Does the same as [`output`], with `input` on standard input.
pub fn output_with_input(command: &mut Command, input: &str) -> Result<String> {
    let printed = bytes_with_input(command, input.as_bytes())?;
    Ok(String::from_utf8_lossy(&printed).into_owned())
}

/// Does the same as [`output`], where the output need not be text.
pub fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("starting {}", shown(command)))?;
    finish(command, output)
}

/// Does the same as [`bytes`], with `input` on standard input.
pub fn bytes_with_input(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("starting {}", shown(command)))?;
    let mut pipe = child
        .stdin
        .take()
        .ok_or_else(|| anyhow!("no pipe to {}", shown(command)))?;
    let input = input.to_vec();
    let writer = std::thread::spawn(move || pipe.write_all(&input));
    let output = child
        .wait_with_output()
        .with_context(|| format!("waiting for {}", shown(command)))?;
    // A program that failed may not have read all of it. Its own message says more than the broken pipe.
    let written = writer
        .join()
        .map_err(|_| anyhow!("writing to {}", shown(command)))?;
    let printed = finish(command, output)?;
    written.with_context(|| format!("writing to {}", shown(command)))?;
    Ok(printed)
}

/// Runs `program` with `arguments` to its end.
pub fn run(program: &str, arguments: &[&str]) -> Result<String> {
    output(Command::new(program).args(arguments))
}

fn finish(command: &Command, output: Output) -> Result<Vec<u8>> {
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let said = if error.trim().is_empty() {
            String::from_utf8_lossy(&output.stdout)
        } else {
            error
        };
        bail!("{}: {}: {}", shown(command), output.status, said.trim());
    }
    Ok(output.stdout)
}

fn shown(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(
        command
            .get_args()
            .map(|argument| argument.to_string_lossy().into_owned()),
    );
    let text = words.join(" ");
    match text.char_indices().nth(300) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text,
    }
}
