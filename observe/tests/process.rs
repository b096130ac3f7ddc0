//! The program as the container starts it: its version, and what it says of a missing setting.

use std::process::Command;

fn program() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_thuban-observe"));
    program.env_clear();
    program
}

#[test]
fn the_program_tells_its_version() {
    let output = program().arg("--version").output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert_eq!(
        printed.trim(),
        format!("thuban-observe {}", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn a_missing_address_is_told_by_its_flag() {
    let output = program().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(said.contains("--pod-ip"), "{said}");
}
