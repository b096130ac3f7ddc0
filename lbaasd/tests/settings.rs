//! The program's settings, as a user meets them.

use std::process::Command;

#[test]
fn the_documented_settings_are_in_the_help() {
    let output = Command::new(env!("CARGO_BIN_EXE_lbaasd"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{help}");
    let pages = [
        include_str!("../../docs/load-balancers.md"),
        include_str!("../../docs/load-balancers/operations.md"),
        include_str!("../../docs/load-balancers/without-routers.md"),
    ];
    let is_documented = |text: &str| pages.iter().any(|page| page.contains(text));
    for setting in [
        "THUBAN_DEFAULT_LOAD_BALANCER",
        "THUBAN_LBAASD_METRICS_PORT",
        "THUBAN_L2_SECONDS",
    ] {
        assert!(
            help.contains(setting) && is_documented(setting),
            "{setting}: {help}"
        );
    }
    for port in ["6088", "6089"] {
        assert!(help.contains(port) && is_documented(port), "{port}: {help}");
    }
}
