//! The platforms that images are built for: this machine's own, and arm64 from an x86-64 machine (`cross.rs`).

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Platform {
    #[value(name = "linux/amd64")]
    Amd64,
    #[value(name = "linux/arm64")]
    Arm64,
}

impl Platform {
    /// Returns the platform of this machine.
    pub const fn own() -> Self {
        if cfg!(target_arch = "aarch64") {
            Self::Arm64
        } else {
            Self::Amd64
        }
    }

    /// Returns the platforms that a command was given, each once and in a fixed order. None given: this machine's own.
    pub fn chosen(given: &[Self]) -> Vec<Self> {
        let mut chosen = given.to_vec();
        if chosen.is_empty() {
            chosen.push(Self::own());
        }
        chosen.sort();
        chosen.dedup();
        chosen
    }

    /// Returns the architecture's name in images, and in Go's variable GOARCH.
    pub const fn architecture(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns the compiler's name of the target.
    pub const fn target(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::Platform;

    #[test]
    fn platforms_are_each_built_once() {
        assert_eq!(Platform::chosen(&[]), [Platform::own()]);
        let given = [Platform::Arm64, Platform::Amd64, Platform::Arm64];
        assert_eq!(Platform::chosen(&given), [Platform::Amd64, Platform::Arm64]);
    }

    #[test]
    fn platforms_are_named_as_in_registries() {
        for platform in Platform::value_variants() {
            let name = format!("linux/{}", platform.architecture());
            assert_eq!(Platform::from_str(&name, false), Ok(*platform));
        }
        assert!(Platform::from_str("linux/riscv64", false).is_err());
    }
}
