"""SPEC B1: what is personal data and what only looks like it."""

import time

import polars as pl
import pytest

from ingot.corpus.pii import mask_pii


def mask(text: str) -> str:
    return mask_pii(pl.Series([text]))[0][0]


@pytest.mark.parametrize(
    "text",
    [
        "on 2024-01-15 and 15.01.2024 and 01/15/2024",
        "version 1.2.3 and 10.15.7",
        "ISBN 0306406152",
        "ISBN 978-0-306-40615-7 or 0-306-40615-2",
        "at 1700000000 seconds",
        "1.2.3.400 is too large",
        "1.2.3.4.5 has five parts, v1.2.3.4 is a version",
        "12:30:45 and 2024-01-15T12:30:00",
        "x[::2], x[1::2], x[::-1], std::vector, a::b, ::1",
        "mac 00:1a:2b:3c:4d:5e",
        "000-12-3456 666-12-3456 900-12-3456 123-00-4567 123-45-0000",
        "@functools.wraps and user@host and y = a@b.T + w@x.transpose(0)",
    ],
)
def test_B1_not_personal(text: str):
    assert mask(text) == text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("write to contact@example.com.", "write to [EMAIL]."),
        ("<first.last+tag@mail.example.co.uk>", "<[EMAIL]>"),
        ("jürgen@müller.de und x@y.io", "[EMAIL] und [EMAIL]"),
        ("call (415) 555-2671 now", "call [PHONE] now"),
        ("415 555 2671", "[PHONE]"),
        ("call us (415-555-2671) now, (+1 415 555 2671)", "call us ([PHONE]) now, ([PHONE])"),
        ("415-555-2671, 415.555.2671", "[PHONE], [PHONE]"),
        ("415-555-2671... or 415-555-2671--now", "[PHONE]... or [PHONE]--now"),
        ("it is 123-45-6789...", "it is [SSN]..."),
        ("+1 415 555 2671 or +1-415-555-2671.", "[PHONE] or [PHONE]."),
        ("+44 20 7946 0958, +49 30 901820, +14155552671", "[PHONE], [PHONE], [PHONE]"),
        ("SSN 123-45-6789.", "SSN [SSN]."),
        ("1.2.3.4", "[IP]"),
        ("1.2.3.4 5.6.7.8 9.10.11.12", "[IP] [IP] [IP]"),
        ("host 192.168.0.1:80, net 10.0.0.0/8.", "host [IP]:80, net [IP]/8."),
        ("at 2001:0db8:85a3:0000:0000:8a2e:0370:7334.", "at [IP]."),
        ("[2001:db8::1]:80 and fe80::1ff:fe23:4567:890a", "[[IP]]:80 and [IP]"),
        ("::ffff:1.2.3.4 x", "::ffff:[IP] x"),
        ("ご質問はme@example.comまでご連絡ください。", "ご質問は[EMAIL]までご連絡ください。"),
        ("bob@example.com谢谢大家, mail bob@example.com이나 전화", "[EMAIL]谢谢大家, mail [EMAIL]이나 전화"),
        ("me@example.com" + 30 * "あ", "[EMAIL]" + 30 * "あ"),
        ("请致电415-555-2671谢谢", "请致电[PHONE]谢谢"),
        ("服务器192.168.1.77已重启, SSN号123-45-6789", "服务器[IP]已重启, SSN号[SSN]"),
        ("_bob@x.com_ and *bob@x.com*", "[EMAIL]_ and *[EMAIL]*"),
    ],
)
def test_B1_personal(text: str, masked: str):
    assert mask(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "needs Firefox/118.0.1.2 (or Opera/9.80.0.1)",
        "numpy==1.2.3.4 scipy>=1.10.1.1,<2 black~=23.1.0.1 pkg[all]==4.3.2.1",
        "torch == 2.1.0.1 and ruby ~> 3.2.1.0",
        "Version 10.2.3.4, version: 10.2.3.5, version=10.2.3.6, AssemblyVersion('10.2.3.7') and V 10.2.3.8",
        "releases 1.2.3.4, 1.2.3.5 and 1.2.3.6; firmware 2.0.1.7 or 2.0.1.9",
        "as § 4.1.2.3 and Sections 4.1.2.3 and 4.1.2.4 say, see (Table 7.1.1.2) and chapter 12.4.2.1",
        "# 3.1.4.1 Results\n\n### 3.1.4.2 Discussion",
        "1.0.0.0 is 1.0.0.1-final; take 1.4.1.2-rc1 or 1.4.1.2+build9, not 250.0.0.0",
        "tool-1.2.3.4-py3-none-any.whl",
        "Abschnitt 4.1.2.3, версия 1.2.3.4, versión 1.2.3.4",
        "版本 1.2.3.4, 版本：1.2.3.4, 这个版本1.2.3.4, バージョン 1.2.3.4, 第 4.1.2.3 节, 第4.1.2.3节",
        "'fern': '^1.2.3.4', gem 'jar', '~> 1.2.3.4', jar (>= 1.2.3.4), jar (= 1.2.3.5), __version__ = '1.2.3.4'",
        "org.fern:jar:1.2.3.4 owner/image:1.2.3.4 https://fern.org/jar/1.2.3.4/jar.zip",
        "4.1.2.3 Results\n4.1.2.4. Discussion\n  1.1.1.2\tSummary\n| 1.2.1.1 Terms",
        "upgraded from 1.2.3.3 to 1.2.3.4 and updating to 1.2.3.5",
        "Chrome 99.0.1.2, .NET Framework 4.8.1.2, Java 1.8.0.1 and OpenSSL 1.0.2.1",
        "EC 3.4.21.4 (EC 2.7.11.1), OID 1.3.6.1, Art. 1.2.3.4 and step 1.2.3.4",
        "127.0.0.1:8080 is this computer, 255.255.255.0 a mask",
    ],
)
def test_versions_and_sections_are_no_addresses(text: str):
    assert mask(text) == text


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://10.1.2.3/x ssh://bob@10.1.2.3:22 //10.1.2.3", "http://[IP]/x ssh://bob@[IP]:22 //[IP]"),
        ("host/10.1.2.3, ip4/10.1.2.3, db/10.1.2.3:5432", "host/[IP], ip4/[IP], db/[IP]:5432"),
        ("ip.addr == 10.1.2.3 or src==10.1.2.3, ip=10.1.2.3", "ip.addr == [IP] or src==[IP], ip=[IP]"),
        ("the nameserver 10.1.2.3 and servers 10.1.2.4, 10.1.2.5", "the nameserver [IP] and servers [IP], [IP]"),
        ("192.168.1.1-192.168.1.9 and 10.0.0.0/8", "[IP]-[IP] and [IP]/8"),
        ("version 2 of the tool at 10.1.2.3", "version 2 of the tool at [IP]"),
        ("# hosts\n10.1.2.3 # 10.1.2.4", "# hosts\n[IP] # [IP]"),
        (
            "10.1.2.3 Ada\n1.2.3.4 lamp\n8.8.4.44 Lamp\n1.2.3.4 - - [10/Oct]",
            "[IP] Ada\n[IP] lamp\n[IP] Lamp\n[IP] - - [10/Oct]",
        ),
        (
            "Firefox from 10.1.2.3, nginx: 10.1.2.4 - -, moved to 10.1.2.5",
            "Firefox from [IP], nginx: [IP] - -, moved to [IP]",
        ),
        (
            "ip-10.1.2.3 host-10.1.2.4 http://a.org/ip/10.1.2.3/x ftp://10.1.2.4/x/",
            "ip-[IP] host-[IP] http://a.org/ip/[IP]/x ftp://[IP]/x/",
        ),
        ("peer:10.1.2.3 Remote:10.1.2.4, addr >= 10.1.2.5, '10.1.2.6'", "peer:[IP] Remote:[IP], addr >= [IP], '[IP]'"),
        ("<10.1.2.3> [10.1.2.3] (10.1.2.3) 10.1.2.3 > 10.1.2.4", "<[IP]> [[IP]] ([IP]) [IP] > [IP]"),
    ],
)
def test_addresses_beside_signs_of_a_version(text: str, masked: str):
    assert mask(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "icon@2x.png, photo@large.webp and logo@3x.svg",
        "lodash@4.17.21.js react@18.2.0.tgz typescript@5.4.dev",
        "y = a@b.transpose + w@x.shape",
        "report@final.docx main@2.py",
        "user@host.nosuchdomain",
    ],
)
def test_a_name_without_a_top_level_domain_is_no_address(text: str):
    assert mask(text) == text


@pytest.mark.parametrize(
    "address",
    [
        "JANE.DOE@EXAMPLE.ORG",
        "x@startup.technology",
        "иван@почта.рф",
        "me@xn--mller-kva.xn--p1ai",
        "12345@163.com",
        "a@b.example.co.uk",
        "ops@db.internal",
        "who@2degrees.nz",
        "ja@kowalski.pl",
    ],
)
def test_top_level_domains(address: str):
    assert mask(f"write to {address}, please") == "write to [EMAIL], please"


def test_signs_of_a_version_in_a_long_line():
    """With the square of the line's length it would take minutes."""
    assert mask("10.1.2.3 " * 20_000) == "[IP] " * 20_000


def test_colons_without_end_take_no_time():
    texts = ["ab:" * 100_000 + "xyz", ":" * 100_000 + "x 2001:db8::1"]
    began = time.process_time()
    masked, _ = mask_pii(pl.Series(texts))
    assert time.process_time() - began < 5, "with the cube of a text's length it would be hours"
    assert masked[0] == texts[0]
    assert masked[1].endswith("x [IP]")


def test_B1_the_sources_patterns_are_not_reproduced():
    """001's e-mail class accepts "|", and its IP pattern 999.999.999.999."""
    assert mask("user@example.c|m") == "user@example.c|m"
    assert mask("a|user@example.com|b") == "a|[EMAIL]|b"
    assert mask("999.999.999.999") == "999.999.999.999"


def test_B1_counts_by_kind_ignore_marks_that_were_there():
    texts = pl.Series(["[EMAIL] a@b.org c@d.org", "1.2.3.4 fe80::1 [IP]", "nothing", "123-45-6789 (415) 555-2671"])
    counts = {kind: count.to_list() for kind, count in mask_pii(texts)[1].items()}
    assert {kind: counts[kind] for kind in ("email", "phone", "ssn", "ip")} == {
        "email": [2, 0, 0, 0],
        "phone": [0, 0, 0, 1],
        "ssn": [0, 0, 0, 1],
        "ip": [0, 2, 0, 0],
    }
