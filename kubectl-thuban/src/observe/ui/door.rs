//! Who may ask the local server of `ui`. Other users of this machine reach the port, and pages of other servers can
//! have the browser ask it. Each of these is refused:
//!
//! * who has neither the key of the URL nor the cookie that the key is exchanged for;
//! * the name of another host: by such a name a page can make the browser believe that this server is the page's own
//!   (DNS rebinding);
//! * a request that the browser makes for a page of another server, though it has the cookie: cookies are the same for
//!   all ports of a host.

use hyper::header::{COOKIE, HeaderMap, HeaderValue};
use hyper::{Method, StatusCode, Uri};
use rustls::crypto::ring;

use super::Target;
use crate::observe::{Asked, ObserveError};

/// How many random bytes a key has.
const KEY_BYTES: usize = 32;
const HOST: &str = "host";
/// The header by which browsers say whose page asks (Fetch Metadata).
const SITE: &str = "sec-fetch-site";
/// Its values for this server's own page, and for an address that the user has entered.
const OWN_SITES: [&str; 2] = ["same-origin", "none"];

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// It has the key: it gets the cookie.
    Enter,
    /// It has the cookie.
    Pass,
    Refused(StatusCode, &'static str),
}

pub struct Door {
    host: String,
    key: String,
    /// Name and value.
    cookie: String,
    /// The cookie as it is set.
    set_cookie: HeaderValue,
    page: Target,
}

impl Door {
    pub fn new(port: u16, asked: &Asked) -> Result<Self, ObserveError> {
        // The port is in the name, so that two servers don't take each other's cookie away.
        let cookie = format!("thuban-ui-{port}={}", random()?);
        let mut set_cookie = HeaderValue::try_from(format!("{cookie}; Path=/; HttpOnly; SameSite=Strict"))?;
        set_cookie.set_sensitive(true);
        Ok(Self {
            host: format!("127.0.0.1:{port}"),
            key: random()?,
            cookie,
            set_cookie,
            page: Target::new("/", asked),
        })
    }

    /// Returns the URL that lets its holder in.
    pub fn url(&self) -> String {
        format!("http://{}/?key={}", self.host, self.key)
    }

    /// Returns the page behind the door.
    pub fn page(&self) -> &str {
        &self.page.0
    }

    pub fn cookie(&self) -> HeaderValue {
        self.set_cookie.clone()
    }

    pub fn judge(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Admission {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        if text(HOST) != Some(self.host.as_str()) {
            return Admission::Refused(StatusCode::FORBIDDEN, "the Host is not that of the URL");
        }
        if method != Method::GET {
            return Admission::Refused(StatusCode::METHOD_NOT_ALLOWED, "only GET is allowed");
        }
        let key = uri.query().and_then(|query| query.strip_prefix("key="));
        if let Some(key) = key.filter(|_| uri.path() == "/") {
            return if is_same(key, &self.key) {
                Admission::Enter
            } else {
                Admission::Refused(StatusCode::FORBIDDEN, "the key is another one")
            };
        }
        if text(SITE).is_some_and(|site| !OWN_SITES.contains(&site)) {
            return Admission::Refused(StatusCode::FORBIDDEN, "a page of another server asks");
        }
        let mut cookies = headers
            .get_all(COOKIE)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(';'));
        if cookies.any(|cookie| is_same(cookie.trim(), &self.cookie)) {
            Admission::Pass
        } else {
            Admission::Refused(
                StatusCode::FORBIDDEN,
                "open the URL that kubectl thuban ui has printed",
            )
        }
    }
}

/// Returns text that nobody can guess.
pub fn random() -> Result<String, ObserveError> {
    let mut bytes = [0; KEY_BYTES];
    let provider = ring::default_provider();
    provider
        .secure_random
        .fill(&mut bytes)
        .map_err(rustls::Error::from)?;
    Ok(bytes
        .iter()
        .fold(String::new(), |text, byte| format!("{text}{byte:02x}")))
}

/// Compares in a time that says nothing of where two texts differ.
fn is_same(given: &str, own: &str) -> bool {
    let pairs = given.bytes().zip(own.bytes());
    let difference = pairs.fold(0, |difference, (given, own)| difference | (given ^ own));
    given.len() == own.len() && difference == 0
}
