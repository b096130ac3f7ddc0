use std::ffi::OsString;

use clap::Parser;
use clap::error::ErrorKind;
use thuban_api::{IpFamily, VipMode, VipProtocol};

use super::{Arguments, Format, Make, Verb, with_verb};

fn parsed(line: &str) -> Result<Arguments, clap::Error> {
    let words = ["lbaasctl"].into_iter().chain(line.split(' '));
    Arguments::try_parse_from(with_verb(words.map(OsString::from).collect()))
}

fn made(line: &str) -> Make {
    match parsed(line).unwrap().verb {
        Verb::Make(make) => make,
        other => panic!("{line}: {other:?}"),
    }
}

#[test]
fn four_words_make_a_vip() {
    let make = made("shop web 443 tcp");
    assert_eq!((make.name.name.as_str(), make.name.namespace), ("shop", None));
    assert_eq!((make.service.as_str(), make.port), ("web", 443));
    assert_eq!((make.protocol, make.profiles.len()), (VipProtocol::Tcp, 0));
    let more = made("red/shop web 53 UdP office sticky");
    assert_eq!(more.name.namespace.as_deref(), Some("red"));
    assert_eq!(more.protocol, VipProtocol::Udp);
    assert_eq!(more.profiles, ["office", "sticky"]);
    assert_eq!(made("make shop web 443 sctp").protocol, VipProtocol::Sctp);
}

#[test]
fn options_may_be_anywhere() {
    let line = "--pool gold shop --address 203.0.113.7 web 443 tcp --address 2001:db8::7 --family ipv4 --family IPv6 \
                --mode node --dns-name shop.red.example.com office --drain-seconds 30";
    let make = made(line);
    assert_eq!(make.pool.as_deref(), Some("gold"));
    assert_eq!(make.addresses.len(), 2);
    assert_eq!(make.families, [IpFamily::V4, IpFamily::V6]);
    assert_eq!(make.mode, Some(VipMode::Node));
    assert_eq!(made("--mode tunnel shop web 443 tcp").mode, Some(VipMode::Tunnel));
    assert_eq!(make.drain_seconds, Some(30));
    assert_eq!(make.profiles, ["office"]);
    for line in [
        "-n red shop web 443 tcp",
        "shop web 443 tcp -n red",
        "-nred list",
        "list --namespace=red",
    ] {
        assert_eq!(parsed(line).unwrap().namespace.as_deref(), Some("red"), "{line}");
    }
}

#[test]
fn a_wait_has_a_default() {
    let seconds = |line: &str| made(line).wait.seconds;
    assert_eq!(seconds("shop web 443 tcp"), None);
    assert_eq!(seconds("--wait shop web 443 tcp"), Some(60));
    assert_eq!(seconds("shop web 443 tcp --wait=5 office"), Some(5));
    assert!(
        matches!(parsed("delete shop --wait").unwrap().verb, Verb::Delete { wait, .. } if wait.seconds == Some(60))
    );
}

#[test]
fn commands_are_told_from_names() {
    for line in [
        "list",
        "-n red list -A",
        "get shop",
        "members shop",
        "watch",
        "watch shop",
        "delete shop",
        "pools",
    ] {
        assert!(!matches!(parsed(line).unwrap().verb, Verb::Make(_)), "{line}");
    }
    assert_eq!(made("red/list get 80 tcp").name.name, "list");
    assert_eq!(made("shop list 80 tcp members").profiles, ["members"]);
    let listed = parsed("list -o yaml").unwrap().verb;
    assert!(matches!(listed, Verb::List { output, .. } if output.format == Some(Format::Yaml)));
}

#[test]
fn wrong_command_lines_are_refused() {
    for (line, kind) in [
        ("shop", ErrorKind::MissingRequiredArgument),
        ("shop web", ErrorKind::MissingRequiredArgument),
        ("shop web 0 tcp", ErrorKind::ValueValidation),
        ("shop web 65536 tcp", ErrorKind::ValueValidation),
        ("shop web https tcp", ErrorKind::ValueValidation),
        ("shop web 443 icmp", ErrorKind::InvalidValue),
        ("shop web 443 tcp --address shop", ErrorKind::ValueValidation),
        ("list web 80 tcp", ErrorKind::UnknownArgument),
        ("list -o table", ErrorKind::InvalidValue),
    ] {
        let error = parsed(line).unwrap_err();
        assert_eq!(error.kind(), kind, "{line}");
        assert_eq!(error.exit_code(), 2, "{line}");
    }
    let help = parsed("--help").unwrap_err();
    assert!(
        help.to_string().contains("lbaasctl shop web 443 tcp --wait"),
        "{help}"
    );
}

#[test]
fn the_documented_examples_are_understood() {
    let page = include_str!("../../../../docs/load-balancers/vips.md");
    let lines = page.lines().chain(super::EXAMPLES.lines());
    let examples = lines.filter_map(|line| line.trim().strip_prefix("lbaasctl "));
    let examples: Vec<String> = examples
        .map(|line| line.split("  ").next().unwrap_or_default().to_owned())
        .collect();
    assert!(examples.len() > 10, "{examples:?}");
    for example in examples {
        parsed(example.trim()).unwrap_or_else(|error| panic!("{example}: {error}"));
    }
}
