//! Rates of pods' traffic: Kubernetes quantities of bits per second.

use std::fmt;
use std::str::FromStr;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The longest text that is read as a rate.
const MAX_TEXT: usize = 32;
/// The rule of the fields that have a rate, in CEL.
const IS_RATE: &str = "isQuantity(self) && quantity(self).compareTo(quantity('1k')) >= 0 \
                       && quantity(self).compareTo(quantity('1P')) <= 0";
const EXPECTED: &str = "expected a quantity of bits per second between 1k and 1P, such as 100M";

/// The limits of the bandwidth of a network's pods, as quantities of bits per second, such as 100M.
/// Each limit is between 1k and 1P. A change takes effect on running pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkBandwidth {
    /// The rate at which a pod without the annotation `kubernetes.io/egress-bandwidth` may send.
    /// Bits per second, from `1k` to `1P`, such as `100M`.
    /// Default: `maxEgress`, and no limit without that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(IS_RATE).message(EXPECTED))]
    #[schemars(length(max = 32))]
    pub default_egress: Option<String>,
    /// The rate at which a pod without the annotation `kubernetes.io/ingress-bandwidth` may receive.
    /// Bits per second, from `1k` to `1P`, such as `100M`.
    /// Default: `maxIngress`, and no limit without that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(IS_RATE).message(EXPECTED))]
    #[schemars(length(max = 32))]
    pub default_ingress: Option<String>,
    /// The highest rate at which a pod may send, whatever its annotation asks for.
    /// Bits per second, from `1k` to `1P`, such as `100M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(IS_RATE).message(EXPECTED))]
    #[schemars(length(max = 32))]
    pub max_egress: Option<String>,
    /// The highest rate at which a pod may receive, whatever its annotation asks for.
    /// Bits per second, from `1k` to `1P`, such as `100M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(IS_RATE).message(EXPECTED))]
    #[schemars(length(max = 32))]
    pub max_ingress: Option<String>,
}

/// The limits of a VPC's bandwidth, as quantities of bits per second, such as 1G.
/// Each limit is between 1k and 1P. A change takes effect on running pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VpcBandwidth {
    /// The rate at which all pods of the VPC on a node together may send to other nodes and to outside.
    /// What is more is dropped. Each node has the limit for itself.
    /// Bits per second, from `1k` to `1P`, such as `100M`.
    /// Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(IS_RATE).message(EXPECTED))]
    #[schemars(length(max = 32))]
    pub egress_per_droplet: Option<String>,
}

/// A rate in bits per second, 1k to 1P: the bounds of Kubernetes' own plugin for bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BitRate(u64);

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BitRateError {
    #[error("{0:?} is not a quantity of bits per second, such as 100M")]
    Unreadable(String),
    #[error("{0:?} is not between 1k and 1P bits per second")]
    OutOfBounds(String),
}

/// What a quantity's suffix multiplies its number by.
enum Scale {
    /// A power of ten.
    Ten(i32),
    /// A power of two.
    Two(u32),
}

impl BitRate {
    const MIN: u128 = 1000;
    const MAX: u128 = 1_000_000_000_000_000;

    /// Returns the whole bytes per second.
    pub const fn bytes_per_second(self) -> u64 {
        self.0 / 8
    }
}

impl FromStr for BitRate {
    type Err = BitRateError;

    /// Reads a quantity. A fraction of a bit counts as a bit, as Kubernetes rounds.
    fn from_str(text: &str) -> Result<Self, BitRateError> {
        // An error tells the begin of a text of any length.
        let told = || text.chars().take(MAX_TEXT).collect::<String>();
        let unreadable = || BitRateError::Unreadable(told());
        let out_of_bounds = || BitRateError::OutOfBounds(told());
        if text.len() > MAX_TEXT {
            return Err(unreadable());
        }
        let (number, scale) = split(text).ok_or_else(unreadable)?;
        if text.starts_with('-') {
            return Err(out_of_bounds());
        }
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let fraction = fraction.trim_end_matches('0');
        let digits: u128 = [whole, fraction].concat().parse().map_err(|_| unreadable())?;
        let after_point = i32::try_from(fraction.len()).map_err(|_| unreadable())?;
        let bits = scaled(digits, after_point, &scale).ok_or_else(out_of_bounds)?;
        let bits = u64::try_from(bits).ok();
        let is_fit = |bits: &u64| (Self::MIN..=Self::MAX).contains(&u128::from(*bits));
        bits.filter(is_fit).map(Self).ok_or_else(out_of_bounds)
    }
}

impl fmt::Display for BitRate {
    /// Writes the rate with the largest suffix that leaves no fraction.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [
            (1_000_000_000_000_000, "P"),
            (1_000_000_000_000, "T"),
            (1_000_000_000, "G"),
            (1_000_000, "M"),
            (1_000, "k"),
        ];
        let (unit, suffix) = units
            .into_iter()
            .find(|(unit, _)| self.0.is_multiple_of(*unit))
            .unwrap_or((1, ""));
        write!(formatter, "{}{suffix}", self.0 / unit)
    }
}

/// Returns a quantity's number, without its sign, and its scale.
fn split(text: &str) -> Option<(&str, Scale)> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_of_number = |character: char| character.is_ascii_digit() || character == '.';
    let end = unsigned.find(|character| !is_of_number(character));
    let (number, suffix) = unsigned.split_at(end.unwrap_or(unsigned.len()));
    let is_number = number.bytes().any(|byte| byte.is_ascii_digit())
        && number.bytes().filter(|byte| *byte == b'.').count() <= 1;
    Some((number, scale(suffix)?)).filter(|_| is_number)
}

fn scale(suffix: &str) -> Option<Scale> {
    Some(match suffix {
        "n" => Scale::Ten(-9),
        "u" => Scale::Ten(-6),
        "m" => Scale::Ten(-3),
        "" => Scale::Ten(0),
        "k" => Scale::Ten(3),
        "M" => Scale::Ten(6),
        "G" => Scale::Ten(9),
        "T" => Scale::Ten(12),
        "P" => Scale::Ten(15),
        "E" => Scale::Ten(18),
        "Ki" => Scale::Two(10),
        "Mi" => Scale::Two(20),
        "Gi" => Scale::Two(30),
        "Ti" => Scale::Two(40),
        "Pi" => Scale::Two(50),
        "Ei" => Scale::Two(60),
        exponent => Scale::Ten(exponent.strip_prefix(['e', 'E'])?.parse().ok()?),
    })
}

/// Returns `digits` with so many of them after the point, scaled and rounded up. `None`: far too much.
fn scaled(digits: u128, after_point: i32, scale: &Scale) -> Option<u128> {
    let (digits, ten) = match scale {
        Scale::Ten(ten) => (digits, ten.checked_sub(after_point)?),
        Scale::Two(two) => (digits.checked_mul(1 << two)?, -after_point),
    };
    if digits == 0 {
        return Some(0);
    }
    let power = 10_u128.checked_pow(ten.unsigned_abs());
    if ten >= 0 {
        digits.checked_mul(power?)
    } else {
        // A divisor that is too large for its type leaves less than a bit.
        Some(power.map_or(1, |power| digits.div_ceil(power)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_kubernetes_reads_quantities() {
        for (text, bits) in [
            ("1k", 1000),
            ("1000", 1000),
            ("999.5", 1000),
            ("10M", 10_000_000),
            ("+10M", 10_000_000),
            ("1.5M", 1_500_000),
            (".5G", 500_000_000),
            ("5.M", 5_000_000),
            ("1Ki", 1024),
            ("1.5Mi", 1_572_864),
            ("1e3", 1000),
            ("12E+2", 1200),
            ("15000e-1", 1500),
            ("1P", 1_000_000_000_000_000),
            ("0.001E", 1_000_000_000_000_000),
            ("1000000m", 1000),
            ("1000.000000000000000000000000000", 1000),
        ] {
            assert_eq!(text.parse(), Ok(BitRate(bits)), "{text}");
        }
    }

    #[test]
    fn what_is_no_rate_is_refused_with_its_text() {
        for text in [
            "", "M", ".", "1.2.3M", "10Q", "10 M", "1kk", "1e", "1ee3", "ten", "1KI", "--1k", "1e1.5",
        ] {
            let error = text.parse::<BitRate>().unwrap_err();
            assert_eq!(error, BitRateError::Unreadable(text.into()));
        }
        for text in [
            "0",
            "-10M",
            "999",
            "1001T",
            "1E",
            "1e99",
            "1e2147483647",
            "1e-2147483648",
            "9999999999999999Ei",
        ] {
            let error = text.parse::<BitRate>().unwrap_err();
            assert_eq!(error, BitRateError::OutOfBounds(text.into()), "{text}");
        }
        let long = "1".repeat(10_000).parse::<BitRate>().unwrap_err().to_string();
        assert!(long.len() < 120, "{long}");
    }

    #[test]
    fn a_rate_is_written_as_people_write_it() {
        for text in ["1k", "10M", "1500k", "1001", "1P", "25G"] {
            assert_eq!(text.parse::<BitRate>().unwrap().to_string(), text);
        }
        assert_eq!("1Ki".parse::<BitRate>().unwrap().to_string(), "1024");
        assert_eq!("10M".parse::<BitRate>().unwrap().bytes_per_second(), 1_250_000);
        assert_eq!("1k".parse::<BitRate>().unwrap().bytes_per_second(), 125);
    }
}
