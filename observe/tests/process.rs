//! The program as the container starts it: its version, and what it says of a missing setting.

use std::process::{Command, Output};

fn run(arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_thuban-observe"));
    program.env_clear().args(arguments).output().unwrap()
}

#[test]
fn the_program_tells_its_version() {
    let output = run(&["--version"]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert_eq!(
        printed.trim(),
        format!("thuban-observe {}", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn a_missing_address_is_told_by_its_flag() {
    let output = run(&[]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(said.contains("--pod-ip"), "{said}");
}
